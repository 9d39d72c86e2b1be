"""A group of tables as an object: its config, its tensors, and what is done to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import integer
from torch_dynemb.ops.columns import Pooling, RowClock, Table
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.process.sending import sent_as_bytes
from torch_dynemb.storage.device import memory_of
from torch_dynemb.storage.tiers import StorageStats
from torch_dynemb.table import clock, compaction, evictions, extension, lookup, removal, row_access
from torch_dynemb.table import rows as table_rows
from torch_dynemb.table import scores as score_access
from torch_dynemb.table import state as table_state
from torch_dynemb.table import stats as table_stats
from torch_dynemb.table import steps as table_steps
from torch_dynemb.table.allocation import allocate
from torch_dynemb.table.config import EvalDefault, TableConfig, check_tables
from torch_dynemb.table.group_config import GroupConfig, checked_config
from torch_dynemb.table.host_state import EvictedIds, EvictionCallback
from torch_dynemb.table.pending_gradients import sort_pending
from torch_dynemb.table.row_access import handle_rows
from torch_dynemb.table.rows import ExportedRows
from torch_dynemb.table.stats import ScalarWriter, TableStats
from torch_dynemb.table.tables import Tables, one_table, used_bytes


@sent_as_bytes
class TableGroup:
    """Tables that are looked up together: one index, one slab of rows per distinct dim.

    Memory is reserved as address space for as many rows as the machine could hold and taken as ids
    arrive: rows never move, and no tensor changes shape. One thread may insert or train at a time
    (on the CPU, another that tries meanwhile raises RuntimeError, and has changed nothing); any
    number may read while none writes. A forked process may only read.

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

    # -- other tables in their place -----------------------------------------------------------

    def to(self, device: torch.device) -> None:
        """Moves everything to another device: new tensors, the old ones are given back.

        Args:
            device: the CPU or a CUDA device.

        Raises:
            TypeError: ``device`` is neither a device nor the name of one.
            RuntimeError: tables cannot lie there, or rows lie in a store, or too little memory, or
                the group is a module's, or this process is a fork of the one that made the tables.
                In both cases nothing has been moved.
        """
        self._check_no_owner("to")
        self.become(self.on_device(device))

    def on_device(self, device: torch.device) -> Tables:
        """The tables where they are there, or else others with their content; see :meth:`to`.

        Args:
            device: the CPU or a CUDA device.

        Returns:
            The group's own tables if they lie on the device, else copies for :meth:`become`.

        Raises:
            TypeError: ``device`` is neither a device nor the name of one.
            RuntimeError: tables cannot lie there, or rows lie in a store, or too little memory.
        """
        memory = memory_of("TableGroup.to", device)
        return (
            self._tables if memory.device == self.device else extension.move(self._tables, memory)
        )

    def become(self, tables: Tables) -> None:
        """Puts other tables in the place of its own, in one step.

        The backward of a lookup in the former ones raises RuntimeError.

        Args:
            tables: made from the group's, such as by :meth:`on_device`.

        Raises:
            ForkedProcessError: this process is a fork of the one that made the group's tables,
                which it keeps.
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
                addresses, or this process is a fork of the one that made the tables. In all cases
                nothing has been changed.
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
                addresses, or this process is a fork of the one that made the tables. In both cases
                nothing has been changed.
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
            ids: int64 [N], feature after feature.
            offsets: int64 [F * B + 1], ascending from 0 to N: where the bags begin, B of each
                feature; may be empty where there is one feature.
            feature_tables: F numbers of tables, from 0.
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
            InUseError: another thread is inserting.
            ForkedProcessError: this process is a fork of the one that made the tables. In all cases
                no id has been inserted. On a GPU, a later call raises what depends on values of
                tensors.
        """
        return lookup.find_or_insert(
            self._tables,
            ids,
            offsets,
            feature_tables,
            feature_policies,
            scores=scores,
            counts=counts,
        )

    def without_expired(
        self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int], handles: Tensor
    ) -> Tensor:
        """Handles in which ids whose ttl has passed are missing; changes nothing.

        Args:
            ids, offsets, feature_tables: as in :meth:`find`.
            handles: int64 [N], what :meth:`find` has found.

        Returns:
            int64 [N], ``handles`` with -1 for such ids; ``handles`` itself if no table has a ttl.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`find`, if a table has a ttl.
        """
        return lookup.without_expired(self._tables, ids, offsets, feature_tables, handles)

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
            RuntimeError: the storage has failed, there is no room in memory or on the disk, or
                this process is a fork of the one that made the tables.
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
            IndexError: there is no such table.
            TypeError: ``table`` is no int, or ids or scores are no int64.
            ValueError: ids or scores are on another device, or scores have another shape; the table
                keeps custom scores, and none have been given; or none keeps any, and some have.
            NoRoomError: the table is full, or memory is short.
            InUseError: another thread is inserting.
            ForkedProcessError: this process is a fork of the one that made the tables. In all cases
                no id has been inserted.
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

        Raises:
            IndexError: there is no such table.
            TypeError: ``table`` is no int, or ids are no int64.
            ValueError: ids are on another device.
        """
        return removal.contains(self._tables, table, ids)

    def reserve(self, table: int, ids: int) -> None:
        """Grows a table's index once, so that ``ids`` ids fit without another growth.

        Args:
            table: its number.
            ids: how many, those in the table included; at least 0. Rows are not reserved.

        Raises:
            IndexError: there is no such table.
            TypeError: ``table`` or ``ids`` is no int.
            ValueError: ``ids`` is less than 0.
            NoRoomError: there is no room for so many (see ``max_rows``), or memory is short.
            InUseError: another thread is inserting.
            ForkedProcessError: this process is a fork of the one that made the tables. In all cases
                the index has not grown.
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

        Raises:
            IndexError: there is no such table.
            TypeError: ``table`` is no int, or ids are no int64.
            ValueError: ids are on another device.
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
            IndexError: there is no such table.
            TypeError: ``table`` is no int, ids are no int64, or rows no real numbers.
            ValueError: shapes or devices do not match, an id is given twice, or one is the padding
                id. In these cases nothing has been changed.
            NoRoomError: the table is full, or memory is short; no row has been written, and none of
                the new ids is there, nor is a count forgotten. Ids that were evicted to make room
                stay away.
            ForkedProcessError: this process is a fork of the one that made the tables.
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
            IndexError: there is no such table.
            TypeError: ``table`` is no int, or ``value`` is no number.
            ForkedProcessError: this process is a fork of the one that made the tables. In all cases
                no row has been changed.
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
            IndexError: there is no such table.
            TypeError: ``table``, ``batch_size`` or ``since`` is no int, or ``score`` is no str.
            ValueError: the score that ``since`` is about is not kept, or ``batch_size`` is less
                than 4.
        """
        return table_rows.export(
            self._tables, table, batch_size=batch_size, since=since, score=score
        )

    # -- scores and time -----------------------------------------------------------------------

    def deciding_score(self, table: int) -> str:
        """The score that decides who is evicted from a table; ``"none"``: it keeps none.

        Args:
            table: its number.

        Raises:
            IndexError: there is no such table.
            TypeError: ``table`` is no int.
        """
        return score_access.deciding_score(self._tables, table)

    def get_score(self, table: int, ids: Tensor, *, score: str | None = None) -> ops.ScoredIds:
        """Scores of ids of one table; changes nothing.

        Args:
            table: its number.
            ids: int64 of any shape, n of them.
            score: which of those that are kept; default: the one that decides who is evicted.

        Returns:
            ``scores``, int64 [n], 0 for an id that is not there, and ``found``, bool [n].

        Raises:
            IndexError: there is no such table.
            TypeError: ``table`` is no int, ids are no int64, or ``score`` is no str.
            ValueError: the score is not kept, or ids are on another device.
        """
        return score_access.get_score(self._tables, table, ids, score=score)

    def set_score(
        self, table: int, ids: Tensor, scores: Tensor, *, score: str | None = None
    ) -> int:
        """Sets scores of the ids that are in a table; returns how many of ``ids`` are.

        Args:
            table: its number.
            ids: int64 [n].
            scores: int64 [n]; of several for one id the largest counts. Steps from 0 on,
                frequencies from 0 to 2^62, others any.
            score: as in :meth:`get_score`.

        Raises:
            IndexError: there is no such table.
            TypeError: ``table`` is no int, ids or scores are no int64, or ``score`` is no str.
            ValueError: number, device or values of scores, or a score that is not kept.
            ForkedProcessError: this process is a fork of the one that made the tables. In all cases
                no score has been changed.
        """
        return score_access.set_score(self._tables, table, ids, scores, score=score)

    def set_batch_score(self, table: int, score: int) -> None:
        """The custom score that lookups give the ids of a table from now on.

        Args:
            table: its number.
            score: an int64; scores that come with a lookup go before it.

        Raises:
            IndexError: there is no such table.
            TypeError: ``table`` or ``score`` is no int.
            ValueError: the table keeps no custom scores, or the score leaves int64.
            ForkedProcessError: this process is a fork of the one that made the tables. In all cases
                lookups give what they gave before.
        """
        score_access.set_batch_score(self._tables, table, score)

    def set_now(self, seconds: int) -> None:
        """Sets the time that lookups give their ids, until the next ``optimizer.step()``.

        Where the group lies on several ranks, all of them call it.

        Args:
            seconds: from 0 to 2^62, such as those of Unix time.

        Raises:
            TypeError, ValueError: ``seconds`` is no int, or out of its range.
            RuntimeError: no table keeps times, or this process is a fork of the one that made the
                tables. In all cases the time has not been changed.
        """
        clock.set_now(self._tables, seconds)

    def share_time(self, now: int) -> None:
        """Takes the time from :meth:`agree_on_now`, and no longer from the machine's clock.

        Args:
            now: seconds to begin with, equal on all ranks.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`set_now`.
        """
        clock.share_time(self._tables, now)

    def agree_on_now(self, proposals: Tensor) -> None:
        """Sets the time to the latest that ranks propose, unless it is later already.

        Waits for no device, so that it can be compiled and captured.

        Args:
            proposals: int64 [ranks], what each has in ``proposed_now``.
        """
        clock.agree_on_now(self._tables, proposals)

    @property
    def proposed_now(self) -> Tensor | None:
        """int64 [1], seconds that this rank proposes; None: the group is on its own."""
        return self._tables.host.proposed_now

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
            TypeError, ValueError: ``now`` is no int, is negative or exceeds 2^62; nothing has been
                done.
            ForkedProcessError: this process is a fork of the one that made the tables.
            BackgroundError: an asynchronous checkpoint of the tables has failed, and nothing has
                raised that yet; nothing has been done.
            NoRoomError: ids found no place, and a policy says ``check="error"``; everything else
                has been done.
            RuntimeError: ``now`` is given, but no table keeps times; nothing has been done. Or more
                ids were evicted than there was room to record for :meth:`on_evicted`; the step has
                ended.
        """
        table_steps.step(self._tables, now)

    def sort_pending(self, slab: int) -> None:
        """Puts pending gradients in the order of rows, where a cache gives them another one.

        Args:
            slab: number of the dim and dtype.
        """
        sort_pending(self._tables, slab)

    def check_step(self, now: int | None) -> None:
        """Raises what :meth:`step` would raise before it changes anything.

        Args:
            now: as in :meth:`step`.

        Raises:
            TypeError, ValueError: ``now`` is no int, is negative or exceeds 2^62.
            RuntimeError: ``now`` is given, but no table keeps times.
            ForkedProcessError: this process is a fork of the one that made the tables.
            BackgroundError: an asynchronous checkpoint of the tables has failed, and nothing has
                raised that yet.
        """
        table_steps.check_step(self._tables, now)

    # -- removal -------------------------------------------------------------------------------

    def erase(self, table: int, ids: Tensor) -> int:
        """Removes ids from a table; returns how many were there. Later ids reuse their rows.

        Args:
            table: its number.
            ids: int64 of any shape.

        Raises:
            IndexError: there is no such table.
            TypeError: ``table`` is no int, or ids are no int64.
            ValueError: ids are on another device.
            InUseError: another thread is inserting.
            ForkedProcessError: this process is a fork of the one that made the tables. In all cases
                nothing has been removed.
        """
        return removal.erase(self._tables, table, ids)

    def remove(
        self,
        table: int,
        *,
        not_seen_for: int | None = None,
        expired: bool | None = None,
        score_below: int | None = None,
        norm_below: float | None = None,
        predicate: removal.Predicate | None = None,
        batch_size: int = 1 << 20,
    ) -> int:
        """Removes the ids of a table for which one condition holds; later ids get their rows.

        Between training steps only: handles of a forward whose backward is still to come become
        stale, and their gradients are dropped and counted.

        Args:
            table: its number.
            not_seen_for: that no training lookup of the last so many steps, at least 1, has met.
            expired: True: whose ttl has passed.
            score_below: whose score (the one that decides who is evicted) is less.
            norm_below: whose row has a smaller L2 norm (an untrained row: its initial value); more
                than 0.
            predicate: from ids int64 [n] and scores int64 [n] of a batch to bool [n].
            batch_size: ids looked at at a time, at least 4.

        Returns:
            How many ids were removed.

        Raises:
            IndexError: there is no such table.
            ValueError, TypeError: no condition or several, or one that does not fit the table, or
                ``predicate`` has returned no such mask.
            ForkedProcessError: this process is a fork of the one that made the tables. In all cases
                nothing has been removed, nor where ``predicate`` raises.
        """
        return removal.remove(
            self._tables,
            table,
            not_seen_for=not_seen_for,
            expired=expired,
            score_below=score_below,
            norm_below=norm_below,
            predicate=predicate,
            batch_size=batch_size,
        )

    def clear(self, table: int) -> int:
        """Removes all ids of a table; returns how many. Its index keeps its size.

        Args:
            table: its number.

        Raises:
            IndexError: there is no such table.
            TypeError: ``table`` is no int.
            InUseError: another thread is inserting; nothing has been removed.
            ForkedProcessError: this process is a fork of the one that made the tables; nothing has
                been removed.
        """
        return removal.clear(self._tables, table)

    def reset_counts(self, table: int) -> None:
        """Forgets how often the ids that were not admitted have been seen.

        Args:
            table: its number.

        Raises:
            IndexError: there is no such table.
            TypeError: ``table`` is no int.
            ValueError: the table's admission counts nothing.
            ForkedProcessError: this process is a fork of the one that made the tables; nothing has
                been forgotten.
        """
        removal.reset_counts(self._tables, table)

    def compact(self) -> int:
        """Moves rows together, shrinks the indexes, and gives the memory beyond them back.

        Rows that lie in a store keep their places there, of which later ids take the free ones.

        Between training steps only: handles of a forward whose backward is still to come become
        stale, and their gradients are dropped and counted. Tensors keep shape and address.

        Interrupted, it has been done for some of the tables: all ids keep their rows.

        Returns:
            By how many bytes :meth:`memory` has shrunk.

        Raises:
            ForkedProcessError: this process is a fork of the one that made the tables; nothing has
                been changed.
        """
        return compaction.compact(self._tables)

    def record_evicted(self, records: int, *, rows: bool = False) -> None:
        """Keeps the ids that are evicted from now on, until :meth:`take_evicted`.

        Replaces a tensor: compiled code is compiled again, graphs must be captured again. What has
        been recorded and not taken is dropped; a callback of :meth:`on_evicted` stays.

        Args:
            records: how many ids to keep room for, at least 1; more are counted and lost.
            rows: keep their rows, too. Every lookup then waits for the device, and cannot be
                compiled.

        Raises:
            TypeError: ``records`` is no int, or ``rows`` is no bool.
            ValueError: ``records`` is less than 1.
            RuntimeError: there is too little memory for so many. In all cases nothing has been
                changed, and what had been recorded is kept.
        """
        self._tables = evictions.record_evicted(self._tables, records, rows=rows)

    def on_evicted(
        self, callback: EvictionCallback, *, records: int = 1 << 16, rows: bool = False
    ) -> None:
        """Has ``optimizer.step()`` call ``callback(table name, EvictedIds)``; waits for the device.

        What the callback raises, ``optimizer.step()`` raises: the step has ended, and the ids that
        the callback has not got are lost.

        Args:
            callback: is called once for each table that has evicted ids in the step.
            records, rows: as in :meth:`record_evicted`; records of one step.

        Raises:
            TypeError: ``callback`` is no function, or as in :meth:`record_evicted`.
            ValueError, RuntimeError: as in :meth:`record_evicted`. In all cases nothing has been
                changed. ``optimizer.step()`` raises RuntimeError where a step evicts more ids than
                there is room to record.
        """
        self._tables = evictions.on_evicted(self._tables, callback, records=records, rows=rows)

    def take_evicted(self) -> dict[str, EvictedIds]:
        """What has been recorded since the last call, by table; waits for the device.

        Raises:
            RuntimeError: more ids were evicted than there was room to record; what was recorded is
                lost. Or this process is a fork of the one that made the tables; it is kept.
        """
        return evictions.take_evicted(self._tables)

    # -- sizes ---------------------------------------------------------------------------------

    def size(self, table: int) -> int:
        """Number of ids in a table.

        Args:
            table: its number.

        Raises:
            IndexError: there is no such table.
            TypeError: ``table`` is no int.
        """
        self.config.table(table, "size")
        return int(self.index.tables[table, Table.SIZE])

    def sizes(self) -> dict[str, int]:
        """Number of ids by table name."""
        return {name: self.size(table) for table, name in enumerate(self.names)}

    def memory(self) -> dict[str, int]:
        """Bytes in use: ``rows`` (with generations), ``state``, ``index``, ``total``.

        ``index`` includes scores and what admission counts. Of rows that lie in a store, those
        that are in memory count.
        """
        return used_bytes(self._tables)

    def stale_gradients(self) -> int:
        """Gradients dropped because their row had been given to another id."""
        return int(self.rows.row_clock[len(self.config.tables) + RowClock.STALE])

    def stats(self, *, wait: bool = False) -> dict[str, TableStats]:
        """What each table holds and what has happened to it, by name.

        Args:
            wait: for the device, to count everything until now. Else nothing is waited for; on a
                GPU the figures are those of the last ``optimizer.step()`` that it has finished,
                which may be a step or two behind.
        """
        return table_stats.stats(self._tables, wait=wait)

    def storage_stats(self) -> StorageStats | None:
        """What the cache and the store of tiered tables have done; None: all rows are in memory.

        Raises:
            ForkedProcessError: this process is a fork of the one that made the tables.
        """
        if self._tables.tiers is None:
            return None
        self._tables.check_own()
        return self._tables.tiers.stats()

    def log_to(self, writer: ScalarWriter, step: int | None = None) -> None:
        """Writes :meth:`stats` to a ``torch.utils.tensorboard.SummaryWriter``, as ``table/name``.

        Args:
            writer: anything with its ``add_scalar``.
            step: default: the number of ``optimizer.step()`` so far.

        Raises:
            TypeError: ``writer`` has no ``add_scalar``, or ``step`` is no int.
        """
        table_stats.log_to(self._tables, writer, step)

    # -- serialisation -------------------------------------------------------------------------

    def state_names(self) -> set[str]:
        """Names of the entries of :meth:`state_tensors`."""
        return {"format", *(name for name, _ in table_state.used_tensors(self._tables))}

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies of the used part of everything, after writing the rows that are not written yet.

        Loading it continues bit for bit. ``format`` is a JSON text as uint8.

        Raises:
            RuntimeError: rows lie in a store and need not fit in memory.
        """
        return table_state.save(self._tables)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces everything by a saved state, in place: compiled code knows the addresses.

        Ctrl-C waits until it is done. Where it fails midway, such as for want of memory, no ids are
        left.

        Args:
            tensors: by name, with the dtypes and shapes of those of :meth:`state_tensors`; on any
                device.

        Raises:
            ValueError: ``tensors`` is not the state of a group like this one, or is damaged;
                nothing has been changed.
            ForkedProcessError: this process is a fork of the one that made the tables; nothing has
                been changed. Or rows lie in a store, or memory is short.
        """
        self._tables.check_own()
        table_state.load(self._tables, tensors)

    def __getstate__(self) -> dict[str, Any]:
        self._tables.check_in_memory("pickle, copy.deepcopy")
        host = self._tables.host
        return {
            "arguments": {**self.config.arguments(), "device": self.device},
            "state": self.state_tensors(),
            "hyper": self.rows.hyper.clone(),
            "batch_scored": sorted(host.batch_scored),
            "proposed_now": None if host.proposed_now is None else int(host.proposed_now),
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(**saved["arguments"])  # type: ignore[misc]
        table_state.fill(self._tables, saved["state"])
        self.rows.hyper.copy_(saved["hyper"])
        self._tables.host.batch_scored = set(saved["batch_scored"])
        if saved.get("proposed_now") is not None:
            clock.propose(self._tables, saved["proposed_now"])

    def __deepcopy__(self, memo: dict[int, Any]) -> TableGroup:
        copy = TableGroup.__new__(TableGroup)
        memo[id(self)] = copy
        copy.__setstate__(self.__getstate__())
        return copy


def pooling_of(mode: str) -> Pooling:
    """The pooling of a mode name.

    Raises:
        ValueError: another name than ``"sum"`` or ``"mean"``.
    """
    if mode not in ("sum", "mean"):
        raise ValueError(
            f"mode is {mode!r}, expected 'sum' or 'mean' (nn.EmbeddingBag's 'max' is not supported)"
        )
    return Pooling.SUM if mode == "sum" else Pooling.MEAN


__all__ = [
    "EvalDefault",
    "ExportedRows",
    "TableConfig",
    "TableGroup",
    "handle_rows",
    "pooling_of",
]
