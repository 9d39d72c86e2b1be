"""Tables whose optimizer is made after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.optim import SGD, FusedOptimizer, OptimizerConfig
from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.pending_gradients import add_pending, read_pending
from torch_dynemb.table.tables import Tables

# It gathers gradients until there is an optimizer, which takes them over; it never makes a step.
_NO_OPTIMIZER_YET = SGD(lr=0.0)


class OptimizedLater(TableModule):
    """Base of a module whose optimizer comes when gradients may be pending already.

    Args:
        name: of the table.
        tables: configs of the logical tables.
        trainable: False: there is no optimizer.
        device: of the rows.
        max_rows: rows to reserve; None: what would fill the device's memory.
        seed: of initial values; None: torch's.

    Attributes:
        how_to_optimize: what an error says to who has given it no optimizer.
    """

    how_to_optimize = "call set_optimizer()"

    def __init__(
        self,
        name: str,
        tables: Sequence[TableConfig],
        *,
        trainable: bool,
        device: torch.device | str,
        max_rows: int | None,
        seed: int | None,
    ) -> None:
        super().__init__(
            tables,
            optimizer=_NO_OPTIMIZER_YET if trainable else None,
            trainable=trainable,
            output_dtype=torch.float32,
            split=True,
            device=device,
            max_rows=max_rows,
            memory_budget=None,
            seed=seed,
        )
        self.name = name
        self._has_optimizer = False

    @property
    def optimizer(self) -> FusedOptimizer:
        """The optimizer of the rows.

        Raises:
            RuntimeError: it has none, yet or at all.
        """
        if self.trainable and not self._has_optimizer:
            raise RuntimeError(
                f"{type(self).__name__} {self.name!r} has no optimizer yet: {self.how_to_optimize}"
            )
        return super().optimizer

    @property
    def trained(self) -> Literal["now", "later", "never"]:
        """When its rows are trained: it may have no optimizer yet, or at all."""
        if not self.trainable:
            return "never"
        return "now" if self._has_optimizer else "later"

    def set_optimizer(self, config: OptimizerConfig) -> FusedOptimizer:
        """Gives the rows an optimizer; pending gradients stay.

        Args:
            config: such as ``torch_dynemb.Adam(lr=1e-3)``.

        Returns:
            The new ``optimizer``; using the old one raises.

        Raises:
            TypeError: ``config`` is no optimizer config.
            ValueError: the table is not trainable.
        """
        if not self.trainable:
            raise ValueError(
                f"{type(self).__name__} {self.name!r} is not trainable: it takes no optimizer"
            )
        if not isinstance(config, OptimizerConfig):
            raise TypeError(
                f"{type(self).__name__}.set_optimizer: config is {config!r}, expected one such as "
                "torch_dynemb.Adam(lr=1e-3)"
            )
        return super().set_optimizer(config)

    def _take_optimizer(self, changed: Tables, optimizer: FusedOptimizer | None) -> None:
        super()._take_optimizer(changed, optimizer)
        self._has_optimizer = True

    def _with_optimizer(self, config: OptimizerConfig) -> Tables:
        changed = super()._with_optimizer(config)
        for table in range(len(changed.config.tables)):
            add_pending(changed, table, read_pending(self._group.tables, table))
        return changed


__all__ = ["OptimizedLater"]
