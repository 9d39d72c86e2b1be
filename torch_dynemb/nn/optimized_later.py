"""Tables that get their optimizer later."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

from torch_dynemb.nn.forgotten_steps import FORGOTTEN_STEPS
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.optim import SGD, FusedOptimizer, OptimizerConfig
from torch_dynemb.optim.base import check_config
from torch_dynemb.storage.device import memory_of
from torch_dynemb.storage.tiers import HostStore, Storage
from torch_dynemb.table.allocation import allocate
from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.extension import take_over
from torch_dynemb.table.pending_gradients import add_pending, read_pending
from torch_dynemb.table.tables import Tables

# It gathers gradients until there is an optimizer, which takes them over; it never makes a step.
_NO_OPTIMIZER_YET = SGD(lr=0.0)


class OptimizedLater(TableModule):
    """Base of a module that gets its optimizer when gradients may be pending already.

    What a store keeps of a row has the state of its optimizer. So a table that is trained has none
    before its optimizer comes, which therefore comes before any id.

    Args:
        name: of the table.
        tables: configs of the logical tables.
        trainable: False: there is no optimizer.
        device: of the rows.
        max_rows: rows to reserve; None: what would fill the device's memory.
        seed: of initial values; None: torch's.
        storage: where rows lie that are not in memory; None: all are.

    Attributes:
        how_to_optimize: how to give it an optimizer, for errors.
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
        storage: Storage | None = None,
    ) -> None:
        in_memory = isinstance(storage, HostStore) and (
            storage.cache_size is None or not memory_of(name, device).has_cache
        )
        to_come = None if in_memory or not trainable else storage
        super().__init__(
            tables if storage is None or to_come is not None else _stored(tables, storage),
            optimizer=_NO_OPTIMIZER_YET if trainable else None,
            trainable=trainable,
            split=True,
            device=device,
            max_rows=max_rows,
            seed=seed,
        )
        self.name = name
        self._has_optimizer = False
        self._storage_to_come: Storage | None = to_come

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
        """Give the rows an optimizer; pending gradients stay.

        Args:
            config: such as ``torch_dynemb.Adam(lr=1e-3)``.

        Returns:
            The new ``optimizer``; using the old one raises.

        Raises:
            TypeError: ``config`` is something other than an optimizer config.
            ValueError: the table is not trainable.
            RuntimeError: the table has storage, and ids or an optimizer already; or its store is in
                use, or of other tables.
        """
        if not self.trainable:
            raise ValueError(
                f"{type(self).__name__} {self.name!r} is not trainable: it takes no "
                "optimizer; make it with trainable=True"
            )
        check_config(f"{type(self).__name__}.set_optimizer: config", config)
        return super().set_optimizer(config)

    def prefetch_lookup(self, batch: LookupBatch) -> None:
        """Begin to bring the rows of a lookup into memory.

        Args:
            batch: what the lookup will ask for.

        Raises:
            RuntimeError: the storage has failed, or the table has no optimizer yet.
        """
        self._check_stored("prefetch")
        self._prefetch(batch, 1)

    def _take_optimizer(self, changed: Tables, optimizer: FusedOptimizer | None) -> None:
        super()._take_optimizer(changed, optimizer)
        self._has_optimizer = True
        self._storage_to_come = None

    def _most_backwards(self) -> int:
        return super()._most_backwards() if self._has_optimizer else FORGOTTEN_STEPS

    def _missing_step(self) -> str:
        if self._has_optimizer:
            return super()._missing_step()
        return f"that nothing applies, because it has no optimizer yet: {self.how_to_optimize}"

    def _check_stored(self, call: str) -> None:
        """Raise RuntimeError if ids would come before the store that their rows go to."""
        if self._storage_to_come is not None:
            raise RuntimeError(
                f"{type(self).__name__} {self.name!r}.{call}: it has storage and no optimizer yet, "
                f"and its state is stored with every row: {self.how_to_optimize} first, or make it "
                "with trainable=False"
            )

    def _with_optimizer(self, config: OptimizerConfig) -> Tables:
        if self._storage_to_come is not None:
            return self._with_storage(config, self._storage_to_come)
        if self._group.tables.tiers is not None:
            raise RuntimeError(
                f"{type(self).__name__} {self.name!r}: set_optimizer: it has storage, in which the "
                f"state of {self._group.config.optimizer} lies with every row: save the model with "
                "torch_dynemb.checkpoint, and load it into one with another optimizer"
            )
        changed = super()._with_optimizer(config)
        for table in range(len(changed.config.tables)):
            add_pending(changed, table, read_pending(self._group.tables, table))
        return changed

    def _with_storage(self, optimizer: OptimizerConfig, storage: Storage) -> Tables:
        tables = self._group.tables
        if any(self._group.sizes().values()):
            raise RuntimeError(
                f"{type(self).__name__} {self.name!r}: set_optimizer: it has storage, and already "
                f"ids, {self._group.sizes()}: make the optimizer before ids come in"
            )
        config = dataclasses.replace(
            tables.config, optimizer=optimizer, tables=_stored(tables.config.tables, storage)
        )
        return take_over(allocate(config, tables.memory), tables)


def _stored(tables: Sequence[TableConfig], storage: Storage) -> tuple[TableConfig, ...]:
    return tuple(dataclasses.replace(table, storage=storage) for table in tables)


__all__ = ["OptimizedLater"]
