"""RecIS's optimizers of hash tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, integer, number
from torch_dynemb.distributed.agreement import Option, check_agreement, comparable, options_of
from torch_dynemb.distributed.ranks import process_group_of
from torch_dynemb.optim import (
    Adagrad,
    Adam,
    AdamW,
    AdamWTF,
    FusedOptimizer,
    OptimizerConfig,
    RowWiseAdagrad,
)
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.recis.tables.hash_table import HashTable


class SparseOptimizer(torch.optim.Optimizer):
    """Base of the optimizers: one param group per logical table, one step for all tables.

    State of rows (moments) is saved with the rows, in the model's state dict. The optimizer's state
    dict has hyper-parameters by table name and the position in an accumulation.

    Tables get the optimizer one after another. If construction is interrupted, some tables have it;
    then construct it again.

    Args:
        param_dict: hash tables by name, as ``filter_out_sparse_param(model)`` returns them; tables
            that are not trainable are skipped.
        config: of the rows' optimizer.

    Raises:
        TypeError: an entry is not a hash table.
        ValueError: no table is trainable, or two have one name or share a child's name. Or the
            ranks that share a table were given other hyper-parameters; then all of them raise.
    """

    def __init__(self, param_dict: Mapping[str, HashTable], config: OptimizerConfig) -> None:
        self._tables = _checked_tables(type(self).__name__, param_dict)
        _check_ranks_agree(type(self).__name__, self._tables, config)
        for table in self._tables.values():
            table.set_optimizer(config)
        self._accum_steps = 1
        self._micro_steps = 0
        placeholder = torch.nn.Parameter(torch.empty(0, device="cpu"))
        super().__init__([{"params": [placeholder]}], config.hyper())
        # the tables' own groups: kernels read the lr that is assigned here
        self.param_groups = [group for o in self._optimizers() for group in o.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} refers to the memory of its tables and cannot be copied or "
            "pickled: copy or pickle the model and make it again, or save its state_dict()"
        )

    def _optimizers(self) -> list[FusedOptimizer]:
        return [table.optimizer for table in self._tables.values()]

    def set_grad_accum_steps(self, steps: int) -> None:
        """Update rows only at every ``steps``-th :meth:`step`, with the sum of the gradients.

        Divide the loss by ``steps`` for their mean.

        Args:
            steps: at least 1.

        Raises:
            TypeError, ValueError: ``steps`` is not an int, or less than 1.
            RuntimeError: an accumulation has begun.
        """
        steps = integer("set_grad_accum_steps: steps", steps, least=1)
        if self._micro_steps != 0:
            raise RuntimeError(
                f"set_grad_accum_steps: {self._micro_steps} of {self._accum_steps} steps of an "
                "accumulation have been made: call it after the last one"
            )
        self._accum_steps = steps

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, now: int | None = None
    ) -> float | None:
        """Apply the pending gradients, if it is the last step of an accumulation.

        Args:
            closure: re-evaluates the model and returns the loss.
            now: seconds, the same on all ranks, for tables with timestamps; default: the time on
                which ranks agree.

        Returns:
            The result of ``closure``, or None.

        Raises:
            TypeError: ``closure`` is not a function.
        """
        if closure is not None and not callable(closure):
            raise TypeError(
                f"{type(self).__name__}.step: closure is {described(closure)}, expected a function "
                "or None"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._micro_steps += 1
        if self._micro_steps == self._accum_steps:
            self._micro_steps = 0
            for table in self._tables.values():
                table.optimizer.step(now=now if table.group.config.keeps_time else None)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop pending gradients, except in the middle of an accumulation.

        Args:
            set_to_none: as in torch.optim.Optimizer; it has no effect.
        """
        if self._micro_steps == 0:
            for optimizer in self._optimizers():
                optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return hyper-parameters by table, and the position in an accumulation."""
        return {
            "tables": {name: table.optimizer.state_dict() for name, table in self._tables.items()},
            "grad_accum_steps": self._accum_steps,
            "micro_steps": self._micro_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        Args:
            state_dict: of an optimizer of tables with the same names.

        Raises:
            ValueError: other tables, or another optimizer; nothing is changed.
        """
        saved = state_dict.get("tables", {})
        steps = [state_dict.get(name) for name in ("grad_accum_steps", "micro_steps")]
        accumulated, done = (step if type(step) is int else -1 for step in steps)
        if accumulated < 1 or not 0 <= done < accumulated:
            raise ValueError(
                f"load_state_dict: grad_accum_steps and micro_steps are {steps}, expected numbers "
                "of steps, the second less than the first"
            )
        if sorted(saved) != sorted(self._tables):
            raise ValueError(
                f"load_state_dict: the state is of tables {sorted(saved)}, expected "
                f"{sorted(self._tables)}"
            )
        before = self.state_dict()
        with defer_signals():
            try:
                for name, table in self._tables.items():
                    table.optimizer.load_state_dict(saved[name])
            except BaseException:
                for name, table in self._tables.items():
                    table.optimizer.load_state_dict(before["tables"][name])
                raise
            self._accum_steps, self._micro_steps = accumulated, done

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further groups: the groups are those of the tables.

        Args:
            param_group: as in torch.optim.Optimizer.

        Raises:
            RuntimeError: always, after construction.
        """
        if hasattr(self, "param_groups") and self.param_groups:
            raise RuntimeError(
                f"{type(self).__name__}.add_param_group: the groups are those of the tables: give "
                "other parameters to another optimizer"
            )
        super().add_param_group(param_group)


def _check_ranks_agree(
    owner: str, tables: Mapping[str, HashTable], config: OptimizerConfig
) -> None:
    by_ranks: dict[str, list[str]] = {}
    for name, table in tables.items():
        if table.rank_group is not None:
            by_ranks.setdefault(table.rank_group.name, []).append(name)
    for _, names in sorted(by_ranks.items()):  # in the same order on all ranks
        alike = options_of("", "optimizer", config)
        alike[Option("", "tables")] = comparable(sorted(names))
        check_agreement(owner, alike, process_group_of(tables[names[0]].rank_group))


def _checked_tables(owner: str, param_dict: Mapping[str, HashTable]) -> dict[str, HashTable]:
    if not isinstance(param_dict, Mapping):
        raise TypeError(
            f"{owner}: param_dict is {described(param_dict)}, expected a dict of HashTable: "
            "filter_out_sparse_param(model) gives it"
        )
    tables: dict[str, HashTable] = {}
    owners: dict[str, str] = {}
    for name, table in param_dict.items():
        if not isinstance(table, HashTable):
            raise TypeError(
                f"{owner}: param_dict[{name!r}] is a {type(table).__name__}, expected a HashTable: "
                "filter_out_sparse_param(model) finds them"
            )
        for child in table.children_hashtable:
            if child in owners:
                raise ValueError(
                    f"{owner}: tables {owners[child]!r} and {name!r} both have a child {child!r}, "
                    "expected different names"
                )
            owners[child] = name
        if table.trainable:
            tables[name] = table
    if not tables:
        raise ValueError(f"{owner}: param_dict has {list(param_dict)}, expected a trainable table")
    return tables


class SparseAdam(SparseOptimizer):
    """:class:`torch_dynemb.Adam` for hash tables; weight decay is added to the gradient.

    Args:
        param_dict: hash tables by name.
        lr, betas, eps, weight_decay: as in torch.optim.Adam. Only rows with a gradient change; the
            bias correction counts steps.

    Example:
        >>> from torch_dynemb.recis import (
        ...     DynamicEmbedding, EmbeddingOption, filter_out_sparse_param
        ... )
        >>> option = EmbeddingOption(embedding_dim=4, shared_name="item")
        >>> items = DynamicEmbedding(option)
        >>> optimizer = SparseAdam(filter_out_sparse_param(items), lr=0.1)
        >>> items(torch.tensor([[1, 2]])).sum().backward()
        >>> optimizer.step()
        >>> round(items(torch.tensor([[1]])).sum().item(), 3)
        -0.4
    """

    def __init__(
        self,
        param_dict: Mapping[str, HashTable],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        config = Adam(
            lr=number("SparseAdam: lr", lr), betas=betas, eps=eps, weight_decay=weight_decay
        )
        super().__init__(param_dict, config)


class SparseAdamW(SparseOptimizer):
    """:class:`torch_dynemb.AdamW` for hash tables: w *= 1 - lr * weight_decay, then Adam.

    Args:
        param_dict: hash tables by name.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; only rows with a gradient change.
    """

    def __init__(
        self,
        param_dict: Mapping[str, HashTable],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        config = AdamW(
            lr=number("SparseAdamW: lr", lr), betas=betas, eps=eps, weight_decay=weight_decay
        )
        super().__init__(param_dict, config)


class SparseAdamWTF(SparseOptimizer):
    """AdamW in TensorFlow's form, with a weight decay that does not depend on lr.

    A step is w *= 1 - weight_decay, then w -= lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) +
    eps).

    Args:
        param_dict: hash tables by name.
        lr, betas, eps: as in torch.optim.AdamW; only rows with a gradient change.
        weight_decay: not multiplied by lr.
    """

    def __init__(
        self,
        param_dict: Mapping[str, HashTable],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        config = AdamWTF(
            lr=number("SparseAdamWTF: lr", lr),
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decay_by_lr=False,
        )
        super().__init__(param_dict, config)


class SparseAdagrad(SparseOptimizer):
    """:class:`torch_dynemb.Adagrad` for hash tables.

    Args:
        param_dict: hash tables by name.
        lr, lr_decay, initial_accumulator_value, eps, weight_decay: as in torch.optim.Adagrad; only
            rows with a gradient change.
        save_update_info_interval: 0; others are refused.

    Raises:
        ValueError: an argument is refused; the message says what to use instead.
    """

    def __init__(
        self,
        param_dict: Mapping[str, HashTable],
        lr: float | Tensor = 1e-3,
        lr_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        weight_decay: float = 0,
        save_update_info_interval: int = 0,
    ) -> None:
        if save_update_info_interval != 0:
            raise ValueError(
                "SparseAdagrad: save_update_info_interval is "
                f"{described(save_update_info_interval)}, expected 0: read embeddings() and "
                "slot_group() of a table around a step"
            )
        config = Adagrad(
            lr=number("SparseAdagrad: lr", lr),
            lr_decay=lr_decay,
            eps=eps,
            initial_accumulator_value=initial_accumulator_value,
            weight_decay=weight_decay,
        )
        super().__init__(param_dict, config)


class SparseRowWiseAdagrad(SparseOptimizer):
    """:class:`torch_dynemb.RowWiseAdagrad` for hash tables: one accumulator per row.

    Args:
        param_dict: hash tables by name.
        lr, lr_decay, initial_accumulator_value, eps, weight_decay, maximize: as in
            :class:`torch_dynemb.RowWiseAdagrad`.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    def __init__(
        self,
        param_dict: Mapping[str, HashTable],
        lr: float | Tensor = 1e-3,
        lr_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
    ) -> None:
        config = RowWiseAdagrad(
            lr=number("SparseRowWiseAdagrad: lr", lr),
            lr_decay=lr_decay,
            eps=eps,
            initial_accumulator_value=initial_accumulator_value,
            weight_decay=weight_decay,
            maximize=maximize,
        )
        super().__init__(param_dict, config)


__all__ = [
    "SparseAdagrad",
    "SparseAdam",
    "SparseAdamW",
    "SparseAdamWTF",
    "SparseOptimizer",
    "SparseRowWiseAdagrad",
]
