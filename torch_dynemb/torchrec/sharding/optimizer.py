"""Fused optimizer of dynamic tables as a KeyedOptimizer of TorchRec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer

from torch_dynemb.optim.base import hyper_values
from torch_dynemb.torchrec.planning.options import NOT_TRAINED
from torch_dynemb.torchrec.sharding.tables import ShardTables


class KernelParamGroup(dict[str, Any]):
    """Hyper-parameters of all tables of a kernel; an assignment reaches the tables at once.

    Without tables an assignment has no effect: schedulers also set rates of untrained tables.
    """

    def __init__(self, entries: Mapping[str, Any], tables: ShardTables | None) -> None:
        super().__init__(entries)
        self._tables = tables

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "params" and key in self:
            for of_table in [] if self._tables is None else self._tables.optimizer.param_groups:
                of_table[key] = value
            if key == "lr":
                (value,) = hyper_values(key, value)
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return dict(self)


class TableOptimizer(FusedOptimizer):  # type: ignore[misc]
    """Optimizer of a kernel: backward updates rows, and :meth:`step` ends a training step.

    Calling :meth:`step` is optional: a training forward after a backward ends the previous step. In
    split mode it is required: gradients are pending until :meth:`step` applies their sum.

    State of rows is in the module's state dict, beside the rows. This optimizer has the
    hyper-parameters, which TorchRec saves after ``save_param_groups(True)``.

    Args:
        tables: of a kernel, with one optimizer config.
        params: by ``<table>.weight``: the parameter that TorchRec shows for the table.
    """

    def __init__(self, tables: ShardTables, params: Mapping[str, nn.Parameter]) -> None:
        self._tables = tables
        config = tables.group.config.optimizer
        assert config is not None
        entries = {"params": list(params.values()), **config.hyper()}
        group = KernelParamGroup(entries, None if config == NOT_TRAINED else tables)
        super().__init__(dict(params), {}, [group])

    def step(self, closure: Any = None, *, now: int | None = None) -> None:
        """End a training step; see :meth:`torch_dynemb.FusedOptimizer.step`.

        Args:
            closure: called first.
            now: seconds, the same on all ranks; default: the time on which ranks agree.
        """
        if closure is not None:
            closure()
        self._tables.end_step(now)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop pending gradients, which exist in split mode only."""
        if self._tables.group.config.split:
            self._tables.optimizer.zero_grad()

    def set_optimizer_step(self, step: int) -> None:
        """Raise NotImplementedError: steps come from the state dict of the module."""
        raise NotImplementedError(
            f"set_optimizer_step({step}): dynamic tables count their own steps; they are in the "
            "state dict of the module"
        )


def shown_parameter(shape: Iterable[int], like: Tensor) -> nn.Parameter:
    """Return the parameter without rows that TorchRec shows for a table."""
    parameter = nn.Parameter(like.new_empty((0, *shape)))
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
    return parameter


__all__ = ["TableOptimizer", "shown_parameter"]
