"""Records of evicted ids."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import flag, integer
from torch_dynemb.ops.columns import EVICTED_COLUMNS, Evicted, Table
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.storage.static_tensors import mark_static
from torch_dynemb.table.host_state import EvictedIds, EvictionCallback, EvictionRecords
from torch_dynemb.table.row_access import readable
from torch_dynemb.table.scores import deciding_score, stored_scores
from torch_dynemb.table.tables import Tables, one_table


class _Owner(Protocol):
    """An object with tables that can be replaced."""

    @property
    def tables(self) -> Tables: ...

    def _become(self, tables: Tables) -> None: ...


class Evictions:
    """Evicted ids of a group: ``group.evicted``.

    Args:
        group: of the tables.
    """

    def __init__(self, group: _Owner) -> None:
        self._group = group

    def record(self, records: int, *, rows: bool = False) -> None:
        """Record the ids that are evicted from now on, until :meth:`take`.

        Replaces a tensor: compiled code is compiled again, and graphs must be captured again. If a
        replay of an earlier one evicts ids, :meth:`take` raises. Records that were not taken are
        dropped; a callback of :meth:`call` stays.

        Args:
            records: number of ids to record at most, at least 1; more are counted and lost.
            rows: True: record their rows, too. Every lookup then waits for the device, and cannot
                be compiled.

        Raises:
            TypeError: ``records`` is not an int, or ``rows`` is not a bool.
            ValueError: ``records`` is less than 1.
            RuntimeError: too little memory for so many. After an error nothing has changed, and
                earlier records are kept.
        """
        tables = self._group.tables
        with tables.changing():
            self._become(_recording(tables, records, rows, tables.evictions.callback))

    def call(
        self, callback: EvictionCallback, *, records: int = 1 << 16, rows: bool = False
    ) -> None:
        """Make ``optimizer.step()`` call ``callback(table name, EvictedIds)``.

        ``optimizer.step()`` then waits for the device. It raises the callback's errors after the
        step has ended. Ids that the callback had not received by then are lost.

        Args:
            callback: called once for each table that has evicted ids in the step.
            records, rows: as in :meth:`record`; records of one step.

        Raises:
            TypeError: ``callback`` is not a function, or as in :meth:`record`.
            ValueError, RuntimeError: as in :meth:`record`. After an error nothing has changed.
                ``optimizer.step()`` raises RuntimeError if a step evicts more ids than ``records``.
        """
        if not callable(callback):
            raise TypeError(f"evicted.call: callback is {callback!r}, expected a function")
        tables = self._group.tables
        with tables.changing():
            self._become(_recording(tables, records, rows, callback))

    def _become(self, tables: Tables) -> None:
        self._group._become(tables)
        for replaced in tables.evictions.replaced[-1:]:
            replaced[0].zero_()  # its records are dropped

    def take(self) -> dict[str, EvictedIds]:
        """Return the records since the last call, by table; waits for the device.

        Raises:
            RuntimeError: more ids were evicted than ``records``, and the records are lost. Or a
                graph that was captured before :meth:`record` or :meth:`call` has been replayed, and
                its records are lost.
        """
        return take_evicted(self._group.tables)


def _recording(
    tables: Tables, records: int, rows: bool, callback: EvictionCallback | None
) -> Tables:
    records = integer("evicted.record: records", records, least=1)
    flag("evicted.record: rows", rows)
    evicted = torch.zeros(1 + records, EVICTED_COLUMNS, dtype=torch.int64, device=tables.device)
    mark_static([evicted])
    replaced = tables.evictions.replaced
    if tables.memory.has_graphs:
        replaced = [*replaced, tables.index.evicted]
    kept = EvictionRecords(callback, [[] for _ in tables.config.tables] if rows else None, replaced)
    index = tables.index._replace(evicted=evicted)
    return dataclasses.replace(tables, index=index, evictions=kept)


def record_as(tables: Tables, other: Tables) -> Tables:
    """Return the tables with the records of others, which are their first tables."""
    records = other.index.evicted.shape[0] - 1
    if records == 0:
        return dataclasses.replace(tables, evictions=EvictionRecords(other.evictions.callback))
    kept = other.evictions
    tables = _recording(tables, records, kept.rows is not None, kept.callback)
    tables.index.evicted.copy_(other.index.evicted)
    if kept.rows is not None:
        more = len(tables.config.tables) - len(kept.rows)
        tables.evictions.rows = [*kept.rows, *([] for _ in range(more))]
    return tables


def take_evicted(tables: Tables) -> dict[str, EvictedIds]:
    """Take the records as :meth:`Evictions.take` does."""
    _check_replaced(tables)
    with tables.changing():
        count, lost = tables.index.evicted[0, :2].tolist()
        records = tables.index.evicted[1 : 1 + count].clone()
        kept = tables.evictions.rows
        result = {}
        for t, name in enumerate(tables.config.names) if lost == 0 else ():
            own = records[records[:, Evicted.TABLE] == t]
            if own.shape[0] > 0:
                rows = None if kept is None else torch.cat(kept[t])
                result[name] = EvictedIds(
                    own[:, Evicted.ID].contiguous(), own[:, Evicted.SCORE].contiguous(), rows
                )
        with defer_signals():
            tables.index.evicted[0].zero_()
            if kept is not None:
                tables.evictions.rows = [[] for _ in tables.config.tables]
    if lost > 0:
        raise RuntimeError(
            f"evicted.take: {lost} evicted ids were not recorded: there was room for "
            f"{tables.index.evicted.shape[0] - 1}: call evicted.record with more, or evicted.take "
            "more often"
        )
    return result


def _check_replaced(tables: Tables) -> None:
    for replaced in tables.evictions.replaced:
        stale = int(replaced[0, :2].sum())
        if stale > 0:
            replaced[0].zero_()
            raise RuntimeError(
                f"evicted.take: {stale} evicted ids were not recorded: replays of a graph that was "
                "captured before evicted.record or evicted.call evicted them: capture it again "
                "after that call"
            )


def keep_evicted_rows(tables: Tables, before: int) -> None:
    """Record the rows of evicted ids, before their new owners overwrite them."""
    if tables.evictions.rows is None:
        return
    records = tables.index.evicted[1 + before : 1 + int(tables.index.evicted[0, 0])]
    for t, table in enumerate(tables.config.tables):
        own = records[records[:, Evicted.TABLE] == t]
        if own.shape[0] > 0:
            ids, evicted = (own[:, c].contiguous() for c in (Evicted.ID, Evicted.HANDLE))
            rows, handles = readable(tables, t, ids, evicted)
            batch = ops.LookupBatch.of_rows(ids, tables.one_bag, [t], table.embedding_dim)
            tables.evictions.rows[t].append(ops.embedding_inference(rows, batch, handles))


def evicted_ids(tables: Tables, table: int, ids: Tensor) -> EvictedIds:
    """Copy what records of evictions have of ids, before they are removed.

    Args:
        tables: of the group.
        table: its number.
        ids: int64 [n]; those that the table lacks are skipped.
    """
    ids = ids[ops.find(tables.index, *one_table(tables, table, ids)).handles >= 0]
    deciding = deciding_score(tables, table)
    scores = torch.zeros_like(ids)
    if deciding != "none":
        scores = stored_scores(tables, table, ids, None).scores
    if tables.evictions.rows is None:
        return EvictedIds(ids, scores, None)
    flat, offsets, features = one_table(tables, table, ids)
    found = ops.find(tables.index, flat, offsets, features).handles
    rows, handles = readable(tables, table, flat, found)
    dim = tables.config.tables[table].embedding_dim
    batch = ops.LookupBatch.of_rows(flat, offsets, features, dim)
    return EvictedIds(ids, scores, ops.embedding_inference(rows, batch, handles))


def record_as_evicted(tables: Tables, table: int, evicted: EvictedIds) -> None:
    """Count erased ids of a table as evicted, and record them if evictions are recorded.

    Args:
        tables: of the group.
        table: its number.
        evicted: result of :func:`evicted_ids` from before they were erased.
    """
    count, records = evicted.ids.numel(), tables.index.evicted
    tables.index.tables[table, Table.ERASED] -= count
    tables.index.tables[table, Table.EVICTED] += count
    room = records.shape[0] - 1
    if room == 0 or count == 0:
        return
    used = int(records[0, 0])
    kept = min(count, room - used)
    of_ids = records[1 + used : 1 + used + kept]
    of_ids[:, Evicted.TABLE] = table
    of_ids[:, Evicted.ID] = evicted.ids[:kept]
    of_ids[:, Evicted.SCORE] = evicted.scores[:kept]
    records[0, 0] += kept
    records[0, 1] += count - kept
    if tables.evictions.rows is not None and evicted.rows is not None:
        tables.evictions.rows[table].append(evicted.rows[:kept])


__all__ = [
    "Evictions",
    "evicted_ids",
    "keep_evicted_rows",
    "record_as",
    "record_as_evicted",
    "take_evicted",
]
