"""Wrapper of a torch optimizer that also trains the rows of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torch_dynemb.argument_checks import described
from torch_dynemb.distributed.agreement import Option, check_agreement, comparable, options_of
from torch_dynemb.distributed.ranks import process_group_of
from torch_dynemb.oneembedding.embedding import Embedding
from torch_dynemb.oneembedding.optimizers import config_of
from torch_dynemb.optim import OptimizerConfig
from torch_dynemb.process.interrupts import defer_signals


class _Followed(NamedTuple):
    """An embedding, and the number of the param group that it belongs to."""

    embedding: Embedding
    group: int


class Optimizer(torch.optim.Optimizer):
    """Wrapper of a torch optimizer that trains the rows of embeddings, too.

    The rows get an optimizer of their own. Its options follow the param group of the embedding's
    parameter, so learning rate schedulers work on either optimizer. Gradients of rows are pending
    until :meth:`step`, so several lookups of an embedding count as one. Create it before the first
    lookup that it should train: if a lookup is earlier and its backward later, the gradients are
    lost. ``param_groups`` has the groups of the parameters, then those of the rows;
    ``torch.amp.GradScaler`` finds the gradients of both there.

    Args:
        optimizer: SGD, Adam, AdamW, Adagrad, RMSprop or Adadelta of torch.optim, :class:`Ftrl` or
            :class:`SmartDecayAdam`, created with the parameters of the embeddings and any others.
        embeddings: a list of them.

    Raises:
        TypeError: ``optimizer`` is of another type, or ``embeddings`` is not a list of embeddings.
        ValueError: an embedding's parameter is not in the optimizer, or two embeddings have the
            same name. Also if rows do not support an option, the store options leave too little
            room for the state, or options differ between ranks.

    Example:
        >>> import torch
        >>> from torch_dynemb import oneembedding
        >>> store = oneembedding.make_device_mem_store_options("tables", 1000, size_factor=3)
        >>> embedding = oneembedding.MultiTableEmbedding(
        ...     "items", 4, torch.float32, torch.int64, None, store
        ... )
        >>> model = torch.nn.Sequential(embedding, torch.nn.Linear(4, 1))
        >>> adam = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> optimizer = oneembedding.Optimizer(adam, embeddings=[embedding])
        >>> model(torch.tensor([1, 2, 3])).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(self, optimizer: torch.optim.Optimizer, embeddings: Sequence[Embedding]) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, Optimizer):
            raise TypeError(
                f"Optimizer: optimizer is {described(optimizer)}, expected one such as "
                "torch.optim.Adam(model.parameters())"
            )
        self._followed = _followed(optimizer, embeddings)
        self.optimizer = optimizer
        self._configs = self._wanted()
        for (embedding, _), config in zip(self._followed, self._configs, strict=True):
            embedding.check_optimizer(config)
            alike = options_of("", "optimizer", config)
            alike[Option("", "embedding")] = comparable(embedding.name)
            check_agreement("Optimizer", alike, process_group_of(embedding.rank_group))
        with defer_signals():
            for (embedding, _), config in zip(self._followed, self._configs, strict=True):
                embedding.set_optimizer(config)
        placeholder = torch.nn.Parameter(torch.empty(0, device="cpu"))
        super().__init__([{"params": [placeholder]}], optimizer.defaults)
        self._show_groups()

    def _wanted(self) -> list[OptimizerConfig]:
        """Return the current optimizer config of each embedding, from the param groups."""
        groups = self.optimizer.param_groups
        return [config_of(self.optimizer, groups[number]) for _, number in self._followed]

    def _show_groups(self) -> None:
        self.param_groups = [*self.optimizer.param_groups]
        for embedding, _ in self._followed:
            self.param_groups += embedding.optimizer.param_groups
        self.state = self.optimizer.state

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "Optimizer is bound to the memory of its embeddings and cannot be copied or pickled: "
            "copy or pickle the model and create it again, or save its state_dict()"
        )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply the gradients of parameters and of rows.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The result of ``closure``, or None without one.

        Raises:
            TypeError: ``closure`` is not a function.
            ValueError: an option was changed to a value that rows do not support.
        """
        if closure is not None and not callable(closure):
            raise TypeError(
                f"Optimizer.step: closure is {described(closure)}, expected a function or None"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        for embedding, _ in self._followed:
            embedding.optimizer.step()
        self.optimizer.step()
        return loss

    def _follow(self) -> None:
        """Update the options of the rows from the param groups."""
        configs = self._wanted()
        for place, (embedding, _) in enumerate(self._followed):
            config, last = configs[place], self._configs[place]
            if config == last:
                continue
            if config.description() != last.description():
                raise ValueError(
                    f"Optimizer.step: the options of the param group were changed from {last} to "
                    f"{config}, which needs other row state: create a new Optimizer"
                )
            for of_table in embedding.optimizer.param_groups:
                for name, value in config.hyper().items():
                    of_table[name] = value
            self._configs[place] = config

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients of parameters and of rows.

        Args:
            set_to_none: of parameters, as in torch.optim.Optimizer. Gradients of rows are
                discarded.
        """
        self.optimizer.zero_grad(set_to_none)
        for embedding, _ in self._followed:
            embedding.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the parameters' optimizer; that of rows is in the embedding."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`; the rows follow at the next step.

        Args:
            state_dict: state of the optimizer of the parameters.
        """
        self.optimizer.load_state_dict(state_dict)
        self._show_groups()


def _followed(optimizer: torch.optim.Optimizer, embeddings: Sequence[Embedding]) -> list[_Followed]:
    if not isinstance(embeddings, list | tuple) or not embeddings:
        raise TypeError(
            f"Optimizer: embeddings is {described(embeddings)}, expected a list of embeddings"
        )
    followed: list[_Followed] = []
    for i, embedding in enumerate(embeddings):
        if not isinstance(embedding, Embedding):
            raise TypeError(
                f"Optimizer: embeddings[{i}] is {described(embedding)}, expected one such as "
                "MultiTableEmbedding"
            )
        if any(embedding.name == other.name for other, _ in followed):
            raise ValueError(
                f"Optimizer: two embeddings are named {embedding.name!r}, expected distinct names"
            )
        groups = [
            number
            for number, group in enumerate(optimizer.param_groups)
            if any(parameter is embedding.grad_anchor for parameter in group["params"])
        ]
        if not groups:
            raise ValueError(
                f"Optimizer: the parameter of embedding {embedding.name!r} is not in the optimizer:"
                " create it with embedding.parameters(), after the embedding was moved to its "
                "device"
            )
        followed.append(_Followed(embedding, groups[0]))
    return followed


__all__ = ["Optimizer"]
