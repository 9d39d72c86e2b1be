"""Changes of tables since a reader last took them.

How changes are found:

1. Ops that write a row set its dirty bits, one for every reader.
2. A scan of the index compares the owner of each row with the owner that the reader has seen last.
   The difference gives new and removed ids.

Why: lookups do no extra work, and no list of changes can overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import BUCKET_WIDTH, GENERATION_BITS, GENERATION_MASK
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.storage.static_tensors import mark_static
from torch_dynemb.table.change_reader import ChangeReader
from torch_dynemb.table.lookup import find
from torch_dynemb.table.row_access import DIRTY, handle_rows, read_rows, state_tensors
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.scores import stored_scores
from torch_dynemb.table.tables import Tables, exported, one_table

_READERS = 8  # bits of a byte
_IDS_AT_ONCE = 1 << 20


class ChangedIds(NamedTuple):
    """New, changed and removed ids of a table.

    Attributes:
        ids: int64 [n], ids that are new, or that have a changed row or score.
        handles: int64 [n], of the ids.
        removed: int64 [m], ids that were removed.
    """

    ids: Tensor
    handles: Tensor
    removed: Tensor


class Changes(NamedTuple):
    """New, changed and removed ids of a group, and the new state of the reader.

    Attributes:
        tables: by table.
        owners: by slab, of the rows in use now, as in :class:`ChangeReader`.
    """

    tables: list[ChangedIds]
    owners: list[Tensor]


def copy_rows(
    tables: Tables, table: int, changed: ChangedIds, *, state: bool, scores: Sequence[str]
) -> RowBatch:
    """Copy the rows of changed ids to the CPU.

    Args:
        tables: of the group.
        table: its number.
        changed: the ids; removed ids are skipped.
        state: copy the optimizer state, too.
        scores: names of the scores to copy.
    """
    ids, handles, slab = changed.ids, changed.handles, tables.config.slab_of(table)
    kept = {name: stored_scores(tables, table, ids, name).scores.contiguous() for name in scores}
    if tables.stored(slab) is not None:
        batch = read_rows(tables, table, ids, handles)
        return batch._replace(state=batch.state if state else {}, scores=kept).to("cpu")
    numbers = handle_rows(handles)
    of_slab = state_tensors(tables, slab) if state else {}
    batch = RowBatch(
        ids,
        tables.rows.weights[slab].index_select(0, numbers),
        {name: tensor.index_select(0, numbers) for name, tensor in of_slab.items()},
        kept,
    )
    generations = tables.rows.generations[slab].index_select(0, numbers)
    # rows that were never written
    new = (generations != (handles & GENERATION_MASK)).nonzero()[:, 0]
    if new.numel() > 0:
        values = read_rows(tables, table, ids[new], handles[new])
        batch.rows[new] = values.rows
        for name, tensor in batch.state.items():
            tensor[new] = values.state[name]
    return batch.to("cpu")


def read_changes(tables: Tables, reader: ChangeReader) -> Changes:
    """Return the changes since the last :func:`take_changes`, without taking them.

    It scans the index.

    Args:
        tables: of the group, between two training steps.
        reader: one of the group's.
    """
    tables.check_own()
    changed = [ChangedIds(_no_ids(tables), _no_ids(tables), _no_ids(tables))] * len(
        tables.config.tables
    )
    owners = []
    for slab in range(len(tables.config.slabs)):
        now = _read_slab(tables, reader, slab, changed)
        _find_removed(tables, reader, slab, now, changed)
        owners.append(now)
    return Changes(changed, owners)


def take_changes(tables: Tables, reader: ChangeReader, changes: Changes, since: str | None) -> None:
    """Mark changes as processed.

    Args:
        tables: of the group, unchanged since :func:`read_changes`.
        reader: of the changes.
        changes: result of :func:`read_changes`.
        since: name of the state that later changes are counted from.
    """
    with defer_signals():
        _set_dirty_bits(tables, changes, kept=~reader.bit & DIRTY, added=0)
        reader.owners = changes.owners
        reader.since = since


def mark_changed(tables: Tables, changes: Changes) -> None:
    """Mark all rows as changed, for every reader.

    Use it if another thread may have set dirty bits before :func:`take_changes` cleared them.

    Args:
        tables: of the group.
        changes: the taken changes.
    """
    _set_dirty_bits(tables, changes, kept=DIRTY, added=DIRTY)


def _set_dirty_bits(tables: Tables, changes: Changes, *, kept: int, added: int) -> None:
    """Clear and set dirty bits of all rows that had an owner."""
    tables.memory.wait_beside()
    for slab, owners in enumerate(changes.owners):
        used, stored = owners.shape[0], tables.stored(slab)
        if stored is None:
            dirty = tables.rows.dirty_bits[slab][:used]
            dirty.bitwise_and_(kept).bitwise_or_(added)
        else:
            stored.set_dirty_bits(slab, used, kept=kept, added=added)


def _read_slab(
    tables: Tables, reader: ChangeReader, slab: int, changed: list[ChangedIds]
) -> Tensor:
    """Find new and changed ids of the tables of a slab; return the current owners of rows."""
    now = _no_owners(tables, reader, slab)
    before = _owners_before(tables, reader, slab, now.shape[0])
    if tables.device.type == "cpu" and tables.stored(slab) is None:
        found = _scanned(tables, reader, slab, before, now)
        counts = found.counts.tolist()
        ids_of, handles_of = found.ids.split(counts), found.handles.split(counts)
        for table in _tables_of(tables, slab):
            changed[table] = changed[table]._replace(ids=ids_of[table], handles=handles_of[table])
        return now
    for table in _tables_of(tables, slab):
        ids, handles = _compared(tables, reader, table, before, now)
        changed[table] = changed[table]._replace(ids=ids, handles=handles)
    return now


def _owners_before(tables: Tables, reader: ChangeReader, slab: int, rows: int) -> Tensor:
    """Return the owners of as many rows as are in use now, at the last :func:`take_changes`."""
    if slab >= len(reader.owners):
        return _no_owners(tables, reader, slab)
    owners = reader.owners[slab]
    if owners.shape[0] == rows:
        return owners
    before = _no_owners(tables, reader, slab)
    known = min(rows, owners.shape[0])  # fewer after compact()
    before[:known] = owners[:known]
    return before


def _scanned(
    tables: Tables, reader: ChangeReader, slab: int, before: Tensor, now: Tensor
) -> ops.FoundChanges:
    """Return changed ids and their handles, by a pass over the index and one over the rows."""
    return ops.changed_ids_(
        tables.index,
        tables.rows.generations[slab],
        tables.rows.dirty_bits[slab],
        before,
        now,
        slab=slab,
        reader=reader.bit,
    )


def _compared(
    tables: Tables, reader: ChangeReader, table: int, before: Tensor, now: Tensor
) -> tuple[Tensor, Tensor]:
    """Return changed ids and their handles, by torch operations of any device."""
    ids, handles = [_no_ids(tables)], [_no_ids(tables)]
    for batch in exported(tables, table, _IDS_AT_ONCE):
        rows = batch.handles >> GENERATION_BITS
        owner = ((table + 1) << GENERATION_BITS) | (batch.handles & GENERATION_MASK)
        owners = [batch.ids[:, None], owner[:, None]]
        own = torch.cat([*owners, batch.scores] if reader.scores else owners, 1)
        dirty = _dirty_bits(tables, table, batch.handles)
        here = ((dirty & reader.bit) != 0) | (before[rows] != own).any(1)
        now[rows] = own
        ids.append(batch.ids[here])
        handles.append(batch.handles[here])
    return torch.cat(ids), torch.cat(handles)


def _dirty_bits(tables: Tables, table: int, handles: Tensor) -> Tensor:
    """Return the dirty bits of rows, uint8 [n]; all are set for rows that were never written."""
    slab, rows = tables.config.slab_of(table), handle_rows(handles)
    stored = tables.stored(slab)
    if stored is not None:
        return stored.dirty_bits(slab, handles)
    dirty, generations = tables.rows.dirty_bits[slab], tables.rows.generations[slab]
    written = generations[rows] == (handles & GENERATION_MASK).to(torch.int32)
    return torch.where(written, dirty[rows], DIRTY)


def _find_removed(
    tables: Tables, reader: ChangeReader, slab: int, now: Tensor, changed: list[ChangedIds]
) -> None:
    """Find removed ids: their row has another owner, and they have no other row."""
    if slab >= len(reader.owners):
        return
    lost = lost_owners(reader.owners[slab], now)
    tables_of_lost = owner_tables(lost)
    for table in _tables_of(tables, slab):
        ids = lost[tables_of_lost == table, 0]
        if ids.numel() > 0:
            handles = find(tables, *one_table(tables, table, ids)).handles
            ids = ids[handles < 0]
        changed[table] = changed[table]._replace(removed=ids)


def owner_tables(owners: Tensor) -> Tensor:
    """Return the tables of owners, int64 [n]; -1 for rows without an owner.

    Args:
        owners: in the format of :func:`torch_dynemb.ops.changed_ids_`.
    """
    return (owners[:, 1] >> GENERATION_BITS) - 1


def lost_owners(before: Tensor, now: Tensor) -> Tensor:
    """Return the owners that have lost their rows.

    Args:
        before, now: owners by row, in the format of :func:`torch_dynemb.ops.changed_ids_`.
    """
    both = min(before.shape[0], now.shape[0])
    left = before[:, 1] != 0
    left[:both] &= (before[:both, 0] != now[:both, 0]) | (
        (before[:both, 1] ^ now[:both, 1]) >> GENERATION_BITS != 0
    )
    return before[left]


def _tables_of(tables: Tables, slab: int) -> list[int]:
    return [t for t in range(len(tables.config.tables)) if tables.config.slab_of(t) == slab]


def _no_ids(tables: Tables) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=tables.device)


def _no_owners(tables: Tables, reader: ChangeReader, slab: int) -> Tensor:
    words = tables.index.scores.shape[1] // BUCKET_WIDTH if reader.scores else 0
    words = words if tables.index.scores.shape[0] > 0 else 0
    size = (tables.index.used_rows(slab), 2 + words)
    return torch.zeros(size, dtype=torch.int64, device=tables.device)


def reader_of(tables: Tables, name: str) -> ChangeReader | None:
    """Return a reader that :func:`record_changes` made for these tables, or None.

    Args:
        tables: of the group.
        name: of the reader.
    """
    return tables.host.readers.get(name)


def record_changes(tables: Tables, name: str, *, scores: bool) -> ChangeReader:
    """Record changes for a reader from now on; between two training steps.

    The first reader adds dirty bits to the arguments of updates: compiled code is compiled again,
    and CUDA graphs must be captured again. A second call with the same name returns the same
    reader.

    Args:
        tables: of the group.
        name: of the reader.
        scores: True: changed scores count as changes.

    Raises:
        RuntimeError: rows are in a store, or the tables have eight readers.
    """
    tables.check_own()
    if tables.tiers is not None and not tables.tiers.records_changes:
        tables.check_in_memory(
            "record_changes",
            "save them with torch_dynemb.checkpoint.save_snapshot, which writes changed rows only",
        )
    host = tables.host
    known = host.readers.get(name)
    if known is not None:
        return known
    taken = {reader.bit for reader in host.readers.values()}
    free = [1 << k for k in range(_READERS) if 1 << k not in taken]
    if not free:
        raise RuntimeError(
            f"record_changes: {sorted(host.readers)} read the changes of tables "
            f"{tables.config.names} already, and there is room for {_READERS} readers"
        )
    with defer_signals(), tables.changing():
        if not tables.rows.dirty_bits:
            dirty_bits = [
                tables.memory.reserve((weights.shape[0],), torch.uint8, huge_pages=False)
                for weights in tables.rows.weights
            ]
            mark_static(dirty_bits)
            # bind them before any update uses them
            tables.memory.bind(tables.index, tables.rows._replace(dirty_bits=dirty_bits))
            # in place: modules and optimizers share this list
            tables.rows.dirty_bits.extend(dirty_bits)
        host.readers[name] = ChangeReader(name, free[0], scores)
    return host.readers[name]


def stop_recording(tables: Tables, name: str) -> None:
    """Remove a reader and free its bit for another; dirty bits of rows stay without a meaning.

    Args:
        tables: of the group.
        name: of the reader; may be unknown.
    """
    tables.check_own()
    tables.host.readers.pop(name, None)


__all__ = [
    "ChangeReader",
    "ChangedIds",
    "Changes",
    "copy_rows",
    "lost_owners",
    "mark_changed",
    "owner_tables",
    "read_changes",
    "reader_of",
    "record_changes",
    "stop_recording",
    "take_changes",
]
