"""Who has been evicted."""

from __future__ import annotations

import dataclasses

import torch

from torch_dynemb import ops
from torch_dynemb.argument_checks import flag, integer
from torch_dynemb.ops.columns import EVICTED_COLUMNS, Evicted
from torch_dynemb.process.interrupts import held_back
from torch_dynemb.storage.static_tensors import mark_static
from torch_dynemb.table.host_state import EvictedIds, EvictionCallback, EvictionRecords
from torch_dynemb.table.row_access import readable
from torch_dynemb.table.tables import Tables


def record_evicted(tables: Tables, records: int, *, rows: bool) -> Tables:
    """The tables with room to record who is evicted; see ``TableGroup.record_evicted``."""
    return _recording(tables, records, rows, tables.evictions.callback)


def _recording(
    tables: Tables, records: int, rows: bool, callback: EvictionCallback | None
) -> Tables:
    records = integer("record_evicted: records", records, least=1)
    flag("record_evicted: rows", rows)
    evicted = torch.zeros(1 + records, EVICTED_COLUMNS, dtype=torch.int64, device=tables.device)
    mark_static([evicted])
    kept = EvictionRecords(callback, [[] for _ in tables.config.tables] if rows else None)
    index = tables.index._replace(evicted=evicted)
    return dataclasses.replace(tables, index=index, evictions=kept)


def on_evicted(tables: Tables, callback: EvictionCallback, *, records: int, rows: bool) -> Tables:
    """The tables with a callback at the end of steps; see ``TableGroup.on_evicted``."""
    if not callable(callback):
        raise TypeError(f"on_evicted: callback is {callback!r}, expected a function")
    return _recording(tables, records, rows, callback)


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
    """See :meth:`torch_dynemb.TableGroup.take_evicted`."""
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
    with held_back():
        tables.index.evicted[0].zero_()
        if kept is not None:
            tables.evictions.rows = [[] for _ in tables.config.tables]
    if lost > 0:
        raise RuntimeError(
            f"take_evicted: {lost} evicted ids were not recorded: there was room for "
            f"{tables.index.evicted.shape[0] - 1}: call record_evicted with more, or take_evicted "
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


__all__ = ["keep_evicted_rows", "on_evicted", "record_as", "record_evicted", "take_evicted"]
