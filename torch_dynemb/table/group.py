"""A group of tables as an object: its config, its tensors, and what is done to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from torch_dynemb import ops
from torch_dynemb.argument_checks import integer
from torch_dynemb.ops.columns import Table
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.process.sending import sent_as_bytes
from torch_dynemb.storage.device import memory_of
from torch_dynemb.table import compaction, extension, lookup, removal, row_access
from torch_dynemb.table import rows as table_rows
from torch_dynemb.table import state as table_state
from torch_dynemb.table import steps as table_steps
from torch_dynemb.table.allocation import allocate
from torch_dynemb.table.clock import TableClock
from torch_dynemb.table.config import TableConfig, check_tables
from torch_dynemb.table.evictions import Evictions
from torch_dynemb.table.group_config import GroupConfig, checked_config
from torch_dynemb.table.rows import ExportedRows
from torch_dynemb.table.scores import Scores
from torch_dynemb.table.state import GroupState
from torch_dynemb.table.stats import Usage
from torch_dynemb.table.tables import Tables, one_table


@sent_as_bytes
class TableGroup:
    """Tables that are looked up together: one index, one slab of rows per distinct dim.

    Memory is reserved as address space for as many rows as the machine could hold and taken as ids
    arrive: rows never move, and no tensor changes shape. One thread may insert or train at a time,
    any number may read while none writes.

    Methods take tables by their numbers. They raise IndexError for a table that does not exist,
    TypeError for tables and ids of another type, ValueError for ids on another device. Those that
    change something raise InUseError where another thread inserts (on the CPU), and
    ForkedProcessError in a forked process. Unless a method says otherwise, nothing has been changed
    then.

    Args:
        tables: at least one; names must differ.
        optimizer: of the rows; None for a group that is only read.
        max_rows: rows to reserve per slab; default: what the tables' capacities add up to, or what
            would fill the device's memory, but less where hundreds of groups share the addresses
            of the process.
        memory_budget: bytes that the tables may take together, index and optimizer state included,
            a number or a text such as ``"4GB"``; whoever needs room first gets it, but for a
            sixteenth of an equal share that is kept for each; where several need more than is left,
            they get equal parts. Then ids are evicted, or what their policy says. Exact counts of
            admission come on top, sketches do not.
        seed: default ``torch.initial_seed()``; with a process group, that of rank 0.
        device: of all tensors; default: torch's default device.
        split: backward only gathers gradients, and the optimizer's ``step()`` applies them.

    Raises:
        TypeError, ValueError: a wrong value, or tables that do not go together.
        RuntimeError: tables cannot lie on the device, or too little memory, or addresses.
    """

    owner: str | None = None  # the module that the group is part of

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        optimizer: OptimizerConfig | None,
        max_rows: int | None = None,
        memory_budget: int | str | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        split: bool = False,
    ) -> None:
        config = checked_config(
            tables,
            optimizer=optimizer,
            max_rows=max_rows,
            memory_budget=memory_budget,
            seed=seed,
            split=split,
        )
        self._tables = allocate(config, memory_of("TableGroup", device))

    # -- what it is made of --------------------------------------------------------------------

    @property
    def tables(self) -> Tables:
        """Config and tensors as one record, which the functions of this package take."""
        return self._tables

    @property
    def config(self) -> GroupConfig:
        """What the tables are like."""
        return self._tables.config

    @property
    def index(self) -> ops.IndexTensors:
        """Which ids there are."""
        return self._tables.index

    @property
    def rows(self) -> ops.RowTensors:
        """The rows of the ids."""
        return self._tables.rows

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return self._tables.config.names

    @property
    def device(self) -> torch.device:
        """Where all tensors of the group lie."""
        return self._tables.device

    # -- views ---------------------------------------------------------------------------------

    @property
    def scores(self) -> Scores:
        """What is kept of ids, and decides who is evicted."""
        return Scores(self._tables)

    @property
    def clock(self) -> TableClock:
        """The time that lookups give their ids."""
        return TableClock(self._tables)

    @property
    def evicted(self) -> Evictions:
        """Ids that had to go for others."""
        return Evictions(self)

    @property
    def usage(self) -> Usage:
        """Bytes, ids, hits, evictions."""
        return Usage(self._tables)

    @property
    def state(self) -> GroupState:
        """The raw, bit-exact state as named tensors."""
        return GroupState(self._tables)

    # -- other tables in their place -----------------------------------------------------------

    def to(self, device: torch.device) -> None:
        """Moves everything to another device: new tensors, the old ones are given back.

        Args:
            device: the CPU or a CUDA device.

        Raises:
            TypeError: ``device`` is neither a device nor the name of one.
            RuntimeError: tables cannot lie there, or rows lie in a store, or too little memory, or
                the group is a module's.
        """
        self._check_no_owner("to")
        self.become(extension.on_device(self._tables, device))

    def become(self, tables: Tables) -> None:
        """Puts other tables in the place of its own, in one step.

        The backward of a lookup in the former ones raises RuntimeError.

        Args:
            tables: made from the group's.
        """
        before = self._tables
        before.check_own()
        self._tables = tables
        if tables.rows.row_clock is not before.rows.row_clock:
            before.retire()

    def _check_no_owner(self, method: str) -> None:
        if self.owner is not None:
            raise RuntimeError(
                f"TableGroup.{method}: the group is part of a {self.owner}, which would not "
                f"follow: call the module's own {method}()"
            )

    def add_table(self, table: TableConfig) -> int:
        """Adds a table, between training steps; see :func:`torch_dynemb.table.extension.extend`.

        Args:
            table: what it is like; its name must differ from the others.

        Returns:
            Its number.

        Raises:
            TypeError: ``table`` is no :class:`TableConfig`.
            ValueError: its name is taken, or its policy contradicts the group's budget.
            RuntimeError: the group is a module's, or rows lie in a store, or too little memory, or
                addresses.
        """
        check_tables("add_table", [table])
        self._check_no_owner("add_table")
        self.become(extension.extend(self._tables, table))
        return len(self.config.tables) - 1

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Gives the tables another optimizer; see :func:`torch_dynemb.table.extension.reoptimize`.

        Args:
            config: of the optimizer of all tables; its state starts fresh, rows stay.

        Raises:
            TypeError: ``config`` is no optimizer config.
            RuntimeError: the group is a module's, or rows lie in a store, or too little memory, or
                addresses.
        """
        self._check_no_owner("set_optimizer")
        self.become(extension.reoptimize(self._tables, config))

    # -- lookup --------------------------------------------------------------------------------

    def find(self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int]) -> ops.FoundIds:
        """Handles of ids; changes nothing.

        Args:
            ids: int64 [N], feature after feature.
            offsets: int64 [F * B + 1], ascending from 0 to N: where the bags begin, B of each
                feature; may be empty where there is one feature.
            feature_tables: F numbers of tables, from 0.

        Returns:
            Handles of the ids, and how many of them are missing; see
            :class:`torch_dynemb.ops.FoundIds`.

        Raises:
            TypeError, ValueError: dtype, shape or device of ids or offsets.
            RuntimeError: offsets are not ascending from 0 to N (on a GPU, a later call raises it),
                or a table number is out of range.
        """
        return lookup.find(self._tables, ids, offsets, feature_tables)

    def find_or_insert(
        self,
        ids: Tensor,
        offsets: Tensor,
        feature_tables: Sequence[int],
        feature_policies: Sequence[int] | None = None,
        *,
        scores: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Handles of ids; new ids get a row, if their policy lets them.

        See :func:`torch_dynemb.ops.find_or_insert_`.

        Args:
            ids, offsets, feature_tables: as in :meth:`find`.
            feature_policies: F rows of ``policy``; default: those of the tables.
            scores: int64 [N], custom scores of the ids.
            counts: int64 [N], how often each id occurs, at least 1; default: once where it stands.

        Returns:
            int64 [N]; -2 for padding ids, -3 for ids that were refused a row.

        Raises:
            TypeError: dtype of an argument, or an admission hook has returned no mask.
            ValueError: shape or device of an argument; a table keeps custom scores, and none have
                been given; or none keeps any, and some have been given.
            IndexError: a table number is too large.
            RuntimeError: values of offsets or feature_policies.
            NoRoomError: a table is full, or memory is short.
                On a GPU, a later call raises what depends on values of tensors.
        """
        call = (ids, offsets, feature_tables, feature_policies)
        return lookup.find_or_insert(self._tables, *call, scores=scores, counts=counts)

    def prefetch(
        self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int], *, ahead: int = 1
    ) -> None:
        """Begins to bring rows into memory that a lookup will want, and returns at once.

        Does nothing where all rows are in memory. Nothing is inserted.

        Args:
            ids, offsets, feature_tables: as in :meth:`find`.
            ahead: in how many training steps the lookup comes, at least 1; the rows stay until
                then.

        Raises:
            TypeError, ValueError: as :meth:`find`, or ``ahead`` is no int, or less than 1.
            RuntimeError: the storage has failed, or there is no room in memory or on the disk.
        """
        lookup.prefetch(self._tables, ids, offsets, feature_tables, ahead=ahead)

    def insert(self, table: int, ids: Tensor, *, scores: Tensor | None = None) -> Tensor:
        """Gives rows to ids of one table, as far as its policy lets them, as in training.

        Args:
            table: its number.
            ids: int64 of any shape, n of them.
            scores: int64 [n], custom scores of the ids; of several for one id the largest counts.

        Returns:
            Handles, int64 [n]; -2 for padding ids, -3 for ids that were refused a row.

        Raises:
            TypeError: scores are no int64.
            ValueError: scores are on another device, or have another shape; the table keeps custom
                scores, and none have been given; or none keeps any, and some have.
            NoRoomError: the table is full, or memory is short.
        """
        call = one_table(self._tables, table, ids, "insert")
        return lookup.find_or_insert(self._tables, *call, scores=scores)

    def contains(self, table: int, ids: Tensor) -> Tensor:
        """Which ids are in a table.

        Args:
            table: its number.
            ids: int64 of any shape.

        Returns:
            bool of the shape of ``ids``; False for the padding id, True for an id whose ttl has
            passed.
        """
        return removal.contains(self._tables, table, ids)

    def reserve(self, table: int, ids: int) -> None:
        """Grows a table's index once, so that ``ids`` ids fit without another growth.

        Args:
            table: its number.
            ids: how many, those in the table included; at least 0. Rows are not reserved.

        Raises:
            TypeError: ``ids`` is no int.
            ValueError: ``ids`` is less than 0.
            NoRoomError: there is no room for so many (see ``max_rows``), or memory is short.
        """
        self.config.table(table, "reserve")
        ids = integer("reserve: ids", ids, least=0)
        self._tables.check_own()
        ops.grow_(self.index, table, ids)

    # -- rows ----------------------------------------------------------------------------------

    def read(self, table: int, ids: Tensor) -> Tensor:
        """Rows of ids; changes nothing.

        Args:
            table: its number.
            ids: int64 of any shape, n of them.

        Returns:
            float32 [n, dim]. An id that is not in the table gives its ``eval_default``, the padding
            id zeros, an id whose ttl has passed its row.
        """
        return table_rows.read(self._tables, table, ids)

    def insert_or_assign(self, table: int, ids: Tensor, rows: Tensor) -> None:
        """Sets rows of ids, inserting those that are new; optimizer state of a new row is fresh.

        Admission does not apply, and exact counts of these ids are forgotten (a sketch cannot
        forget one id); other ids are evicted where there is no room. Where many batches of new ids
        are to come, :meth:`reserve` grows the index for them once.

        Args:
            table: its number.
            ids: int64 [n], distinct.
            rows: float [n, dim], rounded to the table's dtype.

        Raises:
            TypeError: rows are no real numbers.
            ValueError: shapes or devices do not match, an id is given twice, or one is padding.
            NoRoomError: the table is full, or memory is short; no row has been written, and none of
                the new ids is there, nor is a count forgotten. Ids that were evicted to make room
                stay away.
        """
        table_rows.insert_or_assign(self._tables, table, ids, rows)

    def materialize(self) -> int:
        """Writes the rows that no backward has written yet; returns how many.

        Rows that lie in a store stay as they are: who reads them gets their initial values.
        """
        return row_access.materialize(self._tables)

    def fill(self, table: int, value: float) -> None:
        """Sets the rows of all ids of a table to a value; optimizer state stays.

        Args:
            table: its number.
            value: rounded to the table's dtype.

        Raises:
            TypeError: ``value`` is no number.
        """
        removal.fill(self._tables, table, value)

    def export(
        self,
        table: int,
        *,
        batch_size: int = 1 << 20,
        since: int | None = None,
        score: str | None = None,
    ) -> Iterator[ExportedRows]:
        """Ids of a table with their rows and scores, at most ``batch_size`` at a time.

        The table must not change while it is iterated. What is wrong is raised by the first batch.

        Args:
            table: its number.
            batch_size: ids of a batch, at least 4.
            since: only ids whose score is at least this: what has changed since a step or a time.
            score: which one ``since`` is about; default: the one that decides who is evicted.

        Raises:
            TypeError: ``batch_size`` or ``since`` is no int, or ``score`` is no str.
            ValueError: the score that ``since`` is about is not kept, or ``batch_size`` is less
                than 4.
        """
        return table_rows.export(
            self._tables, table, batch_size=batch_size, since=since, score=score
        )

    # -- steps ---------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Ends a training step of the device alone; see :func:`torch_dynemb.ops.end_step`."""
        self._tables.memory.end_step(self.index, self.rows)

    @property
    def steps(self) -> int:
        """Training steps that have ended."""
        return self._tables.host.steps

    def step(self, now: int | None = None) -> None:
        """Ends a training step: what ``optimizer.step()`` does for the index.

        Args:
            now: seconds, such as those of Unix time; default: the machine's clock. Where the
                group lies on several ranks, all of them give it, or none.

        Raises:
            TypeError, ValueError: ``now`` is no int, is negative or exceeds 2^62.
            BackgroundError: an asynchronous checkpoint of the tables has failed, and nothing has
                raised that yet.
            NoRoomError: ids found no place, and a policy says ``check="error"``; everything else
                has been done.
            RuntimeError: ``now`` is given, but no table keeps times. Or more ids were evicted than
                there was room to record for ``evicted.call``; the step has ended.
        """
        table_steps.step(self._tables, now)

    # -- removal -------------------------------------------------------------------------------

    def erase(self, table: int, ids: Tensor) -> int:
        """Removes ids from a table; returns how many were there. Later ids reuse their rows.

        Args:
            table: its number.
            ids: int64 of any shape.
        """
        return removal.erase(self._tables, table, ids)

    def remove(
        self,
        table: int,
        *,
        batch_size: int = 1 << 20,
        **condition: Unpack[removal.Conditions],
    ) -> int:
        """Removes the ids of a table for which one condition holds; later ids get their rows.

        Between training steps only: handles of a forward whose backward is still to come become
        stale, and their gradients are dropped and counted.

        Args:
            table: its number.
            batch_size: ids looked at at a time, at least 4.
            condition: one of those that :class:`~torch_dynemb.table.removal.Conditions` has.

        Returns:
            How many ids were removed.

        Raises:
            ValueError, TypeError: no condition or several, or one that does not fit the table, or
                ``predicate`` has returned no such mask.
        """
        return removal.remove(self._tables, table, batch_size=batch_size, **condition)

    def clear(self, table: int) -> int:
        """Removes all ids of a table; returns how many. Its index keeps its size.

        Args:
            table: its number.
        """
        return removal.clear(self._tables, table)

    def reset_counts(self, table: int) -> None:
        """Forgets how often the ids that were not admitted have been seen.

        Args:
            table: its number.

        Raises:
            ValueError: the table's admission counts nothing.
        """
        removal.reset_counts(self._tables, table)

    def compact(self) -> int:
        """Moves rows together, shrinks the indexes, and gives the memory beyond them back.

        Rows that lie in a store keep their places there, of which later ids take the free ones.

        Between training steps only: handles of a forward whose backward is still to come become
        stale, and their gradients are dropped and counted. Tensors keep shape and address.

        Interrupted, it has been done for some of the tables: all ids keep their rows.

        Returns:
            By how many bytes ``usage.memory()`` has shrunk.
        """
        return compaction.compact(self._tables)

    # -- sizes ---------------------------------------------------------------------------------

    def size(self, table: int) -> int:
        """Number of ids in a table.

        Args:
            table: its number.
        """
        self.config.table(table, "size")
        return int(self.index.tables[table, Table.SIZE])

    def sizes(self) -> dict[str, int]:
        """Number of ids by table name."""
        return {name: self.size(table) for table, name in enumerate(self.names)}

    # -- copies --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return table_state.pickled(self._tables)

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(**saved["arguments"])  # type: ignore[misc]
        table_state.fill_pickled(self._tables, saved)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableGroup:
        copy = TableGroup.__new__(TableGroup)
        memo[id(self)] = copy
        copy.__setstate__(self.__getstate__())
        return copy


__all__ = ["TableGroup"]
