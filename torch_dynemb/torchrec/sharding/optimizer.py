"""Fused optimizer of dynamic tables as a KeyedOptimizer of TorchRec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer

from torch_dynemb.optim.base import OptimizerConfig, hyper_values, plain_value
from torch_dynemb.torchrec.planning.options import NOT_TRAINED
from torch_dynemb.torchrec.sharding.tables import ShardTables


class KernelParamGroup(dict[str, Any]):
    """Hyper-parameters of all tables of some kernels; an assignment reaches the tables at once.

    Without tables an assignment has no effect: schedulers also set rates of untrained tables.
    """

    def __init__(self, entries: Mapping[str, Any], tables: Sequence[ShardTables]) -> None:
        super().__init__(entries)
        self._tables = tables

    def follow(self, tables: Sequence[ShardTables], params: Iterable[nn.Parameter]) -> None:
        """Set the tables that assignments reach; values stay."""
        self._tables = tables
        super().__setitem__("params", list(params))

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "params" and key in self:
            for tables in self._tables:
                for of_table in tables.optimizer.param_groups:
                    of_table[key] = value
            if key == "lr":
                (value,) = hyper_values(key, value)
        super().__setitem__(key, plain_value(value))

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return dict(self)


class TableOptimizer(FusedOptimizer):  # type: ignore[misc]
    """Optimizer of kernels: backward updates rows, and :meth:`step` ends a training step.

    Calling :meth:`step` is optional: a training forward after a backward ends the previous step. In
    split mode it is required: gradients are pending until :meth:`step` applies their sum.

    State of rows is in the module's state dict, beside the rows. This optimizer has the
    hyper-parameters, which TorchRec saves after ``save_param_groups(True)``.

    Args:
        tables: of kernels with the same optimizer config; may be empty, on a rank without them.
        params: by ``<table>.weight``: the parameter that TorchRec shows for the table.
        config: optimizer config of the tables.
        group: hyper-parameters, shared with another optimizer of the tables; default: those of the
            config.

    Attributes:
        config: as given.
    """

    params: dict[str, nn.Parameter]

    def __init__(
        self,
        tables: Sequence[ShardTables],
        params: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        group: KernelParamGroup | None = None,
    ) -> None:
        self._tables, self.config = list(tables), config
        if group is None:
            entries = {"params": list(params.values()), **config.hyper()}
            group = KernelParamGroup(entries, self._trained())
        super().__init__(dict(params), {}, [group])

    def _trained(self) -> list[ShardTables]:
        return [] if self.config == NOT_TRAINED else self._tables

    @property
    def group(self) -> KernelParamGroup:
        """The hyper-parameters."""
        (group,) = self.param_groups
        assert isinstance(group, KernelParamGroup)
        return group

    def handle(self) -> TableOptimizer:
        """Return an optimizer with the same tables and hyper-parameters.

        The collection has it beside this one of the kernel, so that it can outlive the kernel.
        """
        return TableOptimizer(self._tables, self.params, self.config, self.group)

    def of_parameters(self) -> TableOptimizer:
        """Return the optimizer to show at the parameters of these tables."""
        shown = _ParameterOptimizer(self._tables, self.params, self.config, self.group)
        shown.param_groups = self.param_groups
        return shown

    def follow(self, optimizers: Sequence[TableOptimizer]) -> None:
        """Take the tables of other optimizers, which share this one's hyper-parameters then.

        Args:
            optimizers: of kernels with the same config; none: this one has no tables any more.
        """
        self._tables = [tables for of in optimizers for tables in of._tables]
        self.params = {name: shown for of in optimizers for name, shown in of.params.items()}
        self.group.follow(self._trained(), self.params.values())
        for of in optimizers:
            of.param_groups[:] = [self.group]

    def step(self, closure: Any = None, *, now: int | None = None) -> None:
        """End a training step; see :meth:`torch_dynemb.FusedOptimizer.step`.

        Args:
            closure: called first.
            now: seconds, the same on all ranks; default: the time on which ranks agree.
        """
        if closure is not None:
            closure()
        for tables in self._tables:
            tables.end_step(now)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop pending gradients, which exist in split mode only."""
        for tables in self._tables:
            if tables.group.config.split:
                tables.optimizer.zero_grad()

    def set_optimizer_step(self, step: int) -> None:
        """Raise NotImplementedError: steps come from the state dict of the module."""
        raise NotImplementedError(
            f"set_optimizer_step({step}): dynamic tables count their own steps; they are in the "
            "state dict of the module"
        )


class _ParameterOptimizer(TableOptimizer):
    """Optimizer of a kernel as a program finds it at each parameter of its tables."""

    def step(self, closure: Any = None, *, now: int | None = None) -> None:
        """End the step that a backward has begun, once for all parameters of the kernel."""
        if any(tables.in_step for tables in self._tables):
            super().step(closure, now=now)


def shown_parameter(
    shape: Iterable[int], device: torch.device | None, *, trained: bool
) -> nn.Parameter:
    """Return the parameter without rows that TorchRec shows for a table.

    Args:
        shape: of a row.
        device: of the rows.
        trained: ``requires_grad``: whether lookups train the table.
    """
    empty = torch.empty((0, *shape), device=device)
    parameter = nn.Parameter(empty, requires_grad=trained)
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
    return parameter


__all__ = ["TableOptimizer", "shown_parameter"]
