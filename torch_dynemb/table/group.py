"""A group of tables as an object: its config, its tensors, and what is done to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import integer
from torch_dynemb.distributed.seed import common_seed
from torch_dynemb.ops.columns import Pooling, RowClock, Table
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.process.sending import sent_as_bytes
from torch_dynemb.storage.device import memory_of
from torch_dynemb.table import clock, compaction, evictions, extension, lookup, removal
from torch_dynemb.table import rows as row_access
from torch_dynemb.table import scores as score_access
from torch_dynemb.table import state as table_state
from torch_dynemb.table import stats as table_stats
from torch_dynemb.table import steps as table_steps
from torch_dynemb.table.allocation import allocate
from torch_dynemb.table.config import EvalDefault, TableConfig, check_tables
from torch_dynemb.table.group_config import GroupConfig, checked_config
from torch_dynemb.table.host_state import EvictedIds, EvictionCallback
from torch_dynemb.table.rows import ExportedRows, handle_rows
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
            seed=common_seed() if seed is None else seed,
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

        Raises:
            RuntimeError: tables cannot lie there, or too little memory, or the group is a module's;
                nothing has been moved.
        """
        self._check_no_owner("to")
        self.become(self.on_device(device))

    def on_device(self, device: torch.device) -> Tables:
        """The tables where they are there, or else others with their content; see :meth:`to`."""
        memory = memory_of("TableGroup.to", device)
        return (
            self._tables if memory.device == self.device else extension.move(self._tables, memory)
        )

    def become(self, tables: Tables) -> None:
        """Puts other tables in the place of its own, in one step."""
        self._tables.check_own()
        self._tables = tables

    def _check_no_owner(self, method: str) -> None:
        if self.owner is not None:
            raise RuntimeError(
                f"TableGroup.{method}: the group is part of a {self.owner}, which would not "
                f"follow: call the module's own {method}()"
            )

    def add_table(self, table: TableConfig) -> int:
        """Adds a table, between training steps; see :func:`torch_dynemb.table.extension.extend`.

        Returns:
            Its number.

        Raises:
            ValueError: its name is taken, or its policy contradicts the group's budget.
            RuntimeError: the group is a module's.
        """
        check_tables("add_table", [table])
        self._check_no_owner("add_table")
        self.become(extension.extend(self._tables, table))
        return len(self.config.tables) - 1

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Gives the tables another optimizer; see :func:`torch_dynemb.table.extension.reoptimize`.

        Raises:
            TypeError: ``config`` is no optimizer config.
            RuntimeError: the group is a module's.
        """
        self._check_no_owner("set_optimizer")
        self.become(extension.reoptimize(self._tables, config))

    # -- lookup --------------------------------------------------------------------------------

    def find(self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int]) -> ops.FoundIds:
        """Handles of ids; see :func:`torch_dynemb.ops.find`."""
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
            feature_policies: rows of ``policy``; default: those of the tables.
            scores: int64 [N], custom scores of the ids.
            counts: int64 [N], how often each id occurs, at least 1; default: once where it stands.

        Raises:
            ValueError: a table keeps custom scores, and none have been given.
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
        """Handles in which ids whose ttl has passed are missing."""
        return lookup.without_expired(self._tables, ids, offsets, feature_tables, handles)

    def insert(self, table: int, ids: Tensor, *, scores: Tensor | None = None) -> Tensor:
        """Gives rows to ids, int64 of any shape, of one table; returns handles int64 [n].

        The table's policy decides as in training.
        """
        call = one_table(self._tables, table, ids, "insert")
        return lookup.find_or_insert(self._tables, *call, scores=scores)

    def contains(self, table: int, ids: Tensor) -> Tensor:
        """Which ids are in a table: bool of the shape of ``ids``."""
        return removal.contains(self._tables, table, ids)

    def reserve(self, table: int, ids: int) -> None:
        """Grows a table's index once, so that ``ids`` ids fit without another growth."""
        self.config.table(table, "reserve")
        ids = integer("reserve: ids", ids, least=0)
        self._tables.check_own()
        ops.grow_(self.index, table, ids)

    # -- rows ----------------------------------------------------------------------------------

    def read(self, table: int, ids: Tensor) -> Tensor:
        """Rows of ids, float32 [n, dim]; an id that is not in the table gives its default."""
        return row_access.read(self._tables, table, ids)

    def insert_or_assign(self, table: int, ids: Tensor, rows: Tensor) -> None:
        """Sets rows of ids, inserting those that are new; optimizer state of a new row is fresh.

        Admission does not apply, and exact counts of these ids are forgotten (a sketch cannot
        forget one id); other ids are evicted where there is no room.

        Args:
            ids: int64 [n], distinct.
            rows: float [n, dim], rounded to the table's dtype.

        Raises:
            ValueError: shapes do not match, an id is given twice, or one is the padding id.
            RuntimeError: the table is full, or memory is short; no row has been written, and none
                of the new ids is there, nor is a count forgotten. Ids that were evicted to make
                room stay away.
        """
        row_access.insert_or_assign(self._tables, table, ids, rows)

    def materialize(self) -> int:
        """Writes the rows that no backward has written yet; returns how many."""
        return row_access.materialize(self._tables)

    def fill(self, table: int, value: float) -> None:
        """Sets the rows of all ids of a table to a value; optimizer state stays."""
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

        The table must not change while it is iterated.

        Args:
            since: only ids whose score is at least this: what has changed since a step or a time.
            score: which one ``since`` is about; default: the one that decides who is evicted.

        Raises:
            ValueError: ``score`` is not kept.
        """
        return row_access.export(
            self._tables, table, batch_size=batch_size, since=since, score=score
        )

    # -- scores and time -----------------------------------------------------------------------

    def deciding_score(self, table: int) -> str:
        """The score that decides who is evicted from a table; ``"none"``: it keeps none."""
        return score_access.deciding_score(self._tables, table)

    def get_score(self, table: int, ids: Tensor, *, score: str | None = None) -> ops.ScoredIds:
        """Scores of ids of one table; see :func:`torch_dynemb.ops.get_scores`.

        Args:
            score: which of those that are kept; default: the one that decides who is evicted.

        Raises:
            ValueError: it is not kept.
        """
        return score_access.get_score(self._tables, table, ids, score=score)

    def set_score(
        self, table: int, ids: Tensor, scores: Tensor, *, score: str | None = None
    ) -> int:
        """Sets scores of the ids that are in a table; returns how many of ``ids`` are.

        Args:
            ids: int64 [n].
            scores: int64 [n]; of several for one id the largest counts. Steps from 0
                on, frequencies from 0 to 2^62, others any.
            score: as in :meth:`get_score`.

        Raises:
            ValueError, TypeError: shape, dtype or values of scores, or a score that is not kept.
        """
        return score_access.set_score(self._tables, table, ids, scores, score=score)

    def set_batch_score(self, table: int, score: int) -> None:
        """The custom score that lookups give the ids of a table from now on.

        Raises:
            ValueError: the table keeps no custom scores, or the score leaves int64.
        """
        score_access.set_batch_score(self._tables, table, score)

    def set_now(self, seconds: int) -> None:
        """Sets the time that lookups give their ids, until the next ``optimizer.step()``.

        Where the group lies on several ranks, all of them call it.

        Raises:
            TypeError, ValueError: not a whole number from 0 on.
            RuntimeError: no table keeps times.
        """
        clock.set_now(self._tables, seconds)

    def share_time(self, now: int) -> None:
        """Takes the time from :meth:`agree_on_now`, and no longer from the machine's clock.

        Args:
            now: seconds to begin with, equal on all ranks.
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
            TypeError, ValueError: ``now`` is no int, or is negative; nothing has been done.
            RuntimeError: ``now`` is given, but no table keeps times; nothing has been done. Or ids
                found no place, and a policy says ``check="error"``; everything else has been done.
        """
        table_steps.step(self._tables, now)

    def check_step(self, now: int | None) -> None:
        """Raises what :meth:`step` would raise before it changes anything."""
        table_steps.check_step(self._tables, now)

    # -- removal -------------------------------------------------------------------------------

    def erase(self, table: int, ids: Tensor) -> int:
        """Removes ids from a table; returns how many were there. Later ids reuse their rows."""
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
            not_seen_for: that no training lookup of the last so many steps has met.
            expired: True: whose ttl has passed.
            score_below: whose score (the one that decides who is evicted) is less.
            norm_below: whose row has a smaller L2 norm (an untrained row: its initial value).
            predicate: from ids int64 [n] and scores int64 [n] of a batch to bool [n].
            batch_size: ids looked at at a time.

        Returns:
            How many ids were removed.

        Raises:
            ValueError, TypeError: no condition or several, or one that does not fit the table.
                Nothing has been removed then, nor where ``predicate`` raises.
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
        """Removes all ids of a table; returns how many. Its index keeps its size."""
        return removal.clear(self._tables, table)

    def reset_counts(self, table: int) -> None:
        """Forgets how often the ids that were not admitted have been seen.

        Raises:
            ValueError: the table's admission counts nothing.
        """
        removal.reset_counts(self._tables, table)

    def compact(self) -> int:
        """Moves rows together, shrinks the indexes, and gives the memory beyond them back.

        Between training steps only: handles of a forward whose backward is still to come become
        stale, and their gradients are dropped and counted. Tensors keep shape and address.

        Interrupted, it has been done for some of the tables: all ids keep their rows.

        Returns:
            By how many bytes :meth:`memory` has shrunk.
        """
        return compaction.compact(self._tables)

    def record_evicted(self, records: int, *, rows: bool = False) -> None:
        """Keeps the ids that are evicted from now on, until :meth:`take_evicted`.

        Replaces a tensor: compiled code is compiled again, graphs must be captured again.

        Args:
            records: how many to keep room for; more are counted and lost.
            rows: keep their rows, too. Every lookup then waits for the device, and cannot be
                compiled.
        """
        self._tables = evictions.record_evicted(self._tables, records, rows=rows)

    def on_evicted(
        self, callback: EvictionCallback, *, records: int = 1 << 16, rows: bool = False
    ) -> None:
        """Has ``optimizer.step()`` call ``callback(table name, EvictedIds)``; waits for the device.

        Args:
            records, rows: as in :meth:`record_evicted`; records of one step.
        """
        self._tables = evictions.on_evicted(self._tables, callback, records=records, rows=rows)

    def take_evicted(self) -> dict[str, EvictedIds]:
        """What has been recorded since the last call, by table; waits for the device.

        Raises:
            RuntimeError: more ids were evicted than there was room to record.
        """
        return evictions.take_evicted(self._tables)

    # -- sizes ---------------------------------------------------------------------------------

    def size(self, table: int) -> int:
        """Number of ids in a table."""
        self.config.table(table, "size")
        return int(self.index.tables[table, Table.SIZE])

    def sizes(self) -> dict[str, int]:
        """Number of ids by table name."""
        return {name: self.size(table) for table, name in enumerate(self.names)}

    def memory(self) -> dict[str, int]:
        """Bytes in use: ``rows`` (with generations), ``state``, ``index``, ``total``.

        ``index`` includes scores and what admission counts.
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

    def log_to(self, writer: ScalarWriter, step: int | None = None) -> None:
        """Writes :meth:`stats` to a ``torch.utils.tensorboard.SummaryWriter``, as ``table/name``.

        Args:
            writer: anything with its ``add_scalar``.
            step: default: the number of ``optimizer.step()`` so far.
        """
        table_stats.log_to(self._tables, writer, step)

    # -- serialisation -------------------------------------------------------------------------

    def state_names(self) -> set[str]:
        """Names of the entries of :meth:`state_tensors`."""
        return {"format", *(name for name, _ in table_state.used_tensors(self._tables))}

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies of the used part of everything, after writing the rows that are not written yet.

        Loading it continues bit for bit. ``format`` is a JSON text as uint8.
        """
        return table_state.save(self._tables)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces everything by a saved state, in place: compiled code knows the addresses.

        Ctrl-C waits until it is done. Where it fails midway, such as for want of memory, no ids are
        left.

        Raises:
            ValueError: ``tensors`` is not the state of a group like this one, or is damaged;
                nothing has been changed.
        """
        self._tables.check_own()
        table_state.load(self._tables, tensors)

    def __getstate__(self) -> dict[str, Any]:
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
