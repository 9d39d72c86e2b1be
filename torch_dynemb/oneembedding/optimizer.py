"""An optimizer of torch that also trains the rows of embeddings."""

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
    """An embedding, and the number of the param group that its rows follow."""

    embedding: Embedding
    group: int


class Optimizer(torch.optim.Optimizer):
    """Trains the rows of embeddings as an optimizer of torch trains parameters.

    The rows get an optimizer of their own with the options of the param group in which the
    embedding's parameter is, and follow them: learning rate schedulers work on either optimizer.
    Gradients of rows are pending until :meth:`step`, so several lookups of an embedding count as
    one. Make it before the first lookup whose gradients it shall apply: those of a lookup that came
    before it and whose backward comes after it are lost. ``param_groups`` has the groups of the
    parameters and then those of the rows, which is how ``torch.amp.GradScaler`` finds the gradients
    of both.

    Args:
        optimizer: SGD, Adam, AdamW or Adagrad of torch.optim, :class:`Ftrl` or
            :class:`SmartDecayAdam`, made with the parameters of the embeddings and any others.
        embeddings: a list of them.

    Raises:
        TypeError: ``optimizer`` is another, or ``embeddings`` are none.
        ValueError: an embedding's parameter is not in the optimizer, two have one name, an option
            of the optimizer does not go with rows, the store options of an embedding leave too
            little room for the state of its rows, or ranks were given different options.

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
        placeholder = torch.nn.Parameter(torch.empty(0))
        super().__init__([{"params": [placeholder]}], optimizer.defaults)
        self._show_groups()

    def _wanted(self) -> list[OptimizerConfig]:
        """What the param groups say by now that the rows of each embedding should do."""
        groups = self.optimizer.param_groups
        return [config_of(self.optimizer, groups[number]) for _, number in self._followed]

    def _show_groups(self) -> None:
        self.param_groups = [*self.optimizer.param_groups]
        for embedding, _ in self._followed:
            self.param_groups += embedding.optimizer.param_groups
        self.state = self.optimizer.state

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "Optimizer belongs to the memory of its embeddings and cannot be copied or pickled: "
            "copy or pickle the model and make it again, or save its state_dict()"
        )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Applies the gradients of parameters and of rows.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What ``closure`` gave, else None.

        Raises:
            TypeError: ``closure`` is no function.
            ValueError: an option has been changed to one that rows cannot follow.
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
        """Gives the rows the options that the param groups have by now."""
        configs = self._wanted()
        for place, (embedding, _) in enumerate(self._followed):
            config, last = configs[place], self._configs[place]
            if config == last:
                continue
            if type(config) is not type(last):
                raise ValueError(
                    f"Optimizer.step: the options of the param group were changed from {last} to "
                    f"{config}, which keeps other state for a row: make a new Optimizer"
                )
            for of_table in embedding.optimizer.param_groups:
                for name, value in config.hyper().items():
                    of_table[name] = value
            self._configs[place] = config

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients.

        Args:
            set_to_none: of parameters, as in torch.optim.Optimizer; rows have none afterwards.
        """
        self.optimizer.zero_grad(set_to_none)
        for embedding, _ in self._followed:
            embedding.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer of the parameters; rows have theirs in the embedding's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave; the rows follow at the next step.

        Args:
            state_dict: of the optimizer of the parameters.
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
                f"Optimizer: two embeddings are called {embedding.name!r}, expected one name each"
            )
        groups = [
            number
            for number, group in enumerate(optimizer.param_groups)
            if any(parameter is embedding.grad_anchor for parameter in group["params"])
        ]
        if not groups:
            raise ValueError(
                f"Optimizer: the parameter of embedding {embedding.name!r} is not in the optimizer:"
                " make that with embedding.parameters(), after the embedding was moved to its "
                "device"
            )
        followed.append(_Followed(embedding, groups[0]))
    return followed


__all__ = ["Optimizer"]
