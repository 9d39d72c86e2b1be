"""Who has been evicted."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from torch_dynemb import ops
from torch_dynemb.argument_checks import flag, integer
from torch_dynemb.ops.columns import EVICTED_COLUMNS, Evicted
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.storage.static_tensors import mark_static
from torch_dynemb.table.host_state import EvictedIds, EvictionCallback, EvictionRecords
from torch_dynemb.table.row_access import readable
from torch_dynemb.table.tables import Tables


class _Owner(Protocol):
    """Has tables that others may take the place of."""

    @property
    def tables(self) -> Tables: ...

    def become(self, tables: Tables) -> None: ...


class Evictions:
    """Ids that a group evicts: ``group.evicted``.

    Args:
        group: whose tables are given room for records.
    """

    def __init__(self, group: _Owner) -> None:
        self._group = group

    def record(self, records: int, *, rows: bool = False) -> None:
        """Keeps the ids that are evicted from now on, until :meth:`take`.

        Replaces a tensor: compiled code is compiled again, graphs must be captured again. What has
        been recorded and not taken is dropped; a callback of :meth:`call` stays.

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
        tables = self._group.tables
        self._group.become(_recording(tables, records, rows, tables.evictions.callback))

    def call(
        self, callback: EvictionCallback, *, records: int = 1 << 16, rows: bool = False
    ) -> None:
        """Has ``optimizer.step()`` call ``callback(table name, EvictedIds)``; waits for the device.

        What the callback raises, ``optimizer.step()`` raises: the step has ended, and the ids that
        the callback has not got are lost.

        Args:
            callback: is called once for each table that has evicted ids in the step.
            records, rows: as in :meth:`record`; records of one step.

        Raises:
            TypeError: ``callback`` is no function, or as in :meth:`record`.
            ValueError, RuntimeError: as in :meth:`record`. In all cases nothing has been changed.
                ``optimizer.step()`` raises RuntimeError where a step evicts more ids than there is
                room to record.
        """
        if not callable(callback):
            raise TypeError(f"evicted.call: callback is {callback!r}, expected a function")
        self._group.become(_recording(self._group.tables, records, rows, callback))

    def take(self) -> dict[str, EvictedIds]:
        """What has been recorded since the last call, by table; waits for the device.

        Raises:
            RuntimeError: more ids were evicted than there was room to record; what was recorded is
                lost.
        """
        return take_evicted(self._group.tables)


def _recording(
    tables: Tables, records: int, rows: bool, callback: EvictionCallback | None
) -> Tables:
    records = integer("evicted.record: records", records, least=1)
    flag("evicted.record: rows", rows)
    evicted = torch.zeros(1 + records, EVICTED_COLUMNS, dtype=torch.int64, device=tables.device)
    mark_static([evicted])
    kept = EvictionRecords(callback, [[] for _ in tables.config.tables] if rows else None)
    index = tables.index._replace(evicted=evicted)
    return dataclasses.replace(tables, index=index, evictions=kept)


def record_as(tables: Tables, other: Tables) -> Tables:
    """The tables with the records of others, which are the first of theirs."""
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
    """See :meth:`Evictions.take`."""
    tables.check_own()
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


def keep_evicted_rows(tables: Tables, before: int) -> None:
    """The new owners have not been written yet: the rows are still those of the old ones."""
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


__all__ = ["Evictions", "keep_evicted_rows", "record_as", "take_evicted"]
