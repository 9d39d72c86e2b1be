"""The tables of a group: settings, tensors, views, their replacement and copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import Self

from torch_dynemb import ops
from torch_dynemb.argument_checks import table_number
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.table import extension
from torch_dynemb.table import state as table_state
from torch_dynemb.table.clock import TableClock
from torch_dynemb.table.config import TableConfig, check_tables
from torch_dynemb.table.evictions import Evictions
from torch_dynemb.table.group_config import GroupConfig
from torch_dynemb.table.scores import Scores
from torch_dynemb.table.state import GroupState
from torch_dynemb.table.stats import Usage
from torch_dynemb.table.tables import Tables


class GroupTables:
    """Base of :class:`TableGroup`: what it has, apart from operations on ids and rows."""

    owner: str | None = None  # the module that the group is part of
    _tables: Tables

    # -- settings and tensors ------------------------------------------------------------------

    @property
    def tables(self) -> Tables:
        """Config and tensors as one record, the argument of the functions of this package."""
        return self._tables

    @property
    def config(self) -> GroupConfig:
        """Settings of the tables."""
        return self._tables.config

    @property
    def index(self) -> ops.IndexTensors:
        """The index of ids: the tensors themselves, for ops; others read them only."""
        return self._tables.index

    @property
    def rows(self) -> ops.RowTensors:
        """The rows of the ids: the tensors themselves, for ops; others read them only."""
        return self._tables.rows

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return self._tables.config.names

    @property
    def device(self) -> torch.device:
        """Device of all tensors of the group."""
        return self._tables.device

    def _number(self, call: str, table: int | str) -> int:
        return table_number(call, self.names, table)

    def _numbers(self, call: str, feature_tables: Sequence[int | str]) -> list[int]:
        """Return numbers of tables; ops check numbers that are given, at less cost."""
        return [
            table if type(table) is int else self._number(call, table) for table in feature_tables
        ]

    # -- views ---------------------------------------------------------------------------------

    @property
    def scores(self) -> Scores:
        """Scores of ids, which evictions go by."""
        return Scores(self._tables)

    @property
    def clock(self) -> TableClock:
        """The time that lookups give their ids."""
        return TableClock(self._tables)

    @property
    def evicted(self) -> Evictions:
        """Evicted ids."""
        return Evictions(self)

    @property
    def usage(self) -> Usage:
        """Bytes, ids, hits, evictions."""
        return Usage(self._tables)

    @property
    def state(self) -> GroupState:
        """The raw, bit-exact state as named tensors."""
        return GroupState(self._tables)

    # -- replacement of the tables -------------------------------------------------------------

    def to(self, device: torch.device) -> None:
        """Move everything to another device: new tensors replace the old ones.

        Args:
            device: the CPU or a CUDA device.

        Raises:
            TypeError: ``device`` is neither a device nor the name of one.
            RuntimeError: tables cannot be on the device, or rows are in a store, or too little
                memory, or the group belongs to a module.
        """
        self._check_no_owner("to")
        with self._tables.changing(moves_rows=True):
            self._become(extension.on_device(self._tables, device))

    def _become(self, tables: Tables) -> None:
        """Replace the tables by others, in one assignment.

        The backward of a lookup in the former tables raises RuntimeError.

        Args:
            tables: made from the group's.
        """
        before = self._tables
        before.check_own()
        self._tables = tables
        if tables.rows.row_clock is not before.rows.row_clock:
            before._retire()

    def _check_no_owner(self, method: str) -> None:
        if self.owner is not None:
            raise RuntimeError(
                f"TableGroup.{method}: the group is part of a {self.owner}, which would not "
                f"follow: call {method}() of the module"
            )

    def add_table(self, table: TableConfig) -> int:
        """Add a table, between training steps; see :func:`torch_dynemb.table.extension.extend`.

        Args:
            table: its settings; its name must differ from the others.

        Returns:
            Its number.

        Raises:
            TypeError: ``table`` is not a :class:`TableConfig`.
            ValueError: its name is taken, or its policy contradicts the group's budget.
            RuntimeError: the group belongs to a module, or rows are in a store, or too little
                memory, or too few addresses.
        """
        check_tables("add_table", [table])
        self._check_no_owner("add_table")
        with self._tables.changing(moves_rows=True):
            self._become(extension.extend(self._tables, table))
        return len(self.config.tables) - 1

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Give the tables another optimizer; see :func:`torch_dynemb.table.extension.reoptimize`.

        Args:
            config: of the optimizer of all tables; its state starts fresh, rows stay.

        Raises:
            TypeError: ``config`` is not an optimizer config.
            RuntimeError: the group belongs to a module, or rows are in a store, or too little
                memory, or too few addresses.
        """
        self._check_no_owner("set_optimizer")
        with self._tables.changing(moves_rows=True):
            self._become(extension.reoptimize(self._tables, config))

    # -- copies --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return table_state.pickled(self._tables)

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(**saved["arguments"])  # type: ignore[misc]
        table_state.fill_pickled(self._tables, saved)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__setstate__(self.__getstate__())
        return copy


__all__ = ["GroupTables"]
