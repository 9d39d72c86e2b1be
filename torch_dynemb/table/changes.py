"""What has changed in tables since somebody asked last.

The ops that write rows set the dirty bits of each row that they write, one for every reader. Which
ids are new or gone is found by a comparison of the index with the owners of rows that the reader
has met before, so no lookup pays for it, and nothing overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import BUCKET_WIDTH, GENERATION_BITS
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.storage.static_tensors import mark_static
from torch_dynemb.table.change_reader import ChangeReader
from torch_dynemb.table.lookup import find
from torch_dynemb.table.row_access import DIRTY, handle_rows, read_rows, state_tensors
from torch_dynemb.table.scores import Scores
from torch_dynemb.table.tables import Tables, exported, one_table

_READERS = 8  # bits of a byte
_GENERATIONS = (1 << GENERATION_BITS) - 1
_IDS_AT_ONCE = 1 << 20


class ChangedIds(NamedTuple):
    """What has changed in a table.

    Attributes:
        ids: int64 [n], ids that are new, or whose row or scores have changed.
        handles: int64 [n], of the ids.
        removed: int64 [m], ids that were there and are gone.
    """

    ids: Tensor
    handles: Tensor
    removed: Tensor


class Changes(NamedTuple):
    """What has changed in a group, and what the reader has met meanwhile.

    Attributes:
        tables: by table.
        owners: by slab, of the rows that are in use now, as in :class:`ChangeReader`.
    """

    tables: list[ChangedIds]
    owners: list[Tensor]


class ChangedRows(NamedTuple):
    """Ids with everything that is kept of them; on the CPU.

    Attributes:
        ids: int64 [n].
        rows: [n, columns], of the dtype of the table.
        state: optimizer state by name, [n] or [n, columns] each.
        scores: int64 [n] by name of the score.
    """

    ids: Tensor
    rows: Tensor
    state: dict[str, Tensor]
    scores: dict[str, Tensor]


def copy_rows(
    tables: Tables, table: int, changed: ChangedIds, *, state: bool, scores: Sequence[str]
) -> ChangedRows:
    """Copies of the rows of changed ids.

    Args:
        tables: of the group, in memory.
        table: its number.
        changed: ids that have rows; ids that are gone are passed over.
        state: with the optimizer state.
        scores: names of those that are copied.
    """
    ids, handles, slab = changed.ids, changed.handles, tables.config.slab_of(table)
    numbers = handle_rows(handles)
    rows = tables.rows.weights[slab].index_select(0, numbers)
    of_slab = state_tensors(tables, slab) if state else {}
    of_rows = {name: tensor.index_select(0, numbers) for name, tensor in of_slab.items()}
    generations = tables.rows.generations[slab].index_select(0, numbers)
    # which nobody has written yet
    new = (generations != (handles & _GENERATIONS)).nonzero()[:, 0]
    if new.numel() > 0:
        values = read_rows(tables, table, ids[new], handles[new])
        rows[new] = values.weights
        for name, tensor in of_rows.items():
            tensor[new] = values.state[name]
    return ChangedRows(
        ids.cpu(),
        rows.cpu(),
        {name: tensor.cpu() for name, tensor in of_rows.items()},
        {
            name: Scores(tables).get(table, ids, score=name).scores.cpu().contiguous()
            for name in scores
        },
    )


def read_changes(tables: Tables, reader: ChangeReader) -> Changes:
    """What has changed since the last :func:`take_changes`; nothing is forgotten yet.

    It takes a scan of the index.

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
    """Forgets changes that have been dealt with.

    Args:
        tables: of the group, as they were at :func:`read_changes`.
        reader: whose changes they are.
        changes: what that has given.
        since: names what changes are counted from, from now on.
    """
    with defer_signals():
        for dirty, owners in zip(tables.rows.dirty_bits, changes.owners, strict=True):
            dirty[: owners.shape[0]].bitwise_and_(~reader.bit & DIRTY)
        reader.owners = changes.owners
        reader.since = since


def mark_changed(tables: Tables, changes: Changes) -> None:
    """Has all rows count as changed, for every reader.

    For bits that :func:`take_changes` may have cleared after another thread had set them.

    Args:
        tables: of the group.
        changes: what was taken.
    """
    for dirty, owners in zip(tables.rows.dirty_bits, changes.owners, strict=True):
        dirty[: owners.shape[0]] = DIRTY


def _read_slab(
    tables: Tables, reader: ChangeReader, slab: int, changed: list[ChangedIds]
) -> Tensor:
    """Finds new and changed ids of the tables of a slab; gives the owners that rows have now."""
    now, before = _no_owners(tables, reader, slab), _no_owners(tables, reader, slab)
    if slab < len(reader.owners):
        known = min(before.shape[0], reader.owners[slab].shape[0])  # compact() gives rows back
        before[:known] = reader.owners[slab][:known]
    find_changed = _scanned if tables.device.type == "cpu" else _compared
    for table in _tables_of(tables, slab):
        ids, handles = find_changed(tables, reader, table, before, now)
        changed[table] = changed[table]._replace(ids=ids, handles=handles)
    return now


def _scanned(
    tables: Tables, reader: ChangeReader, table: int, before: Tensor, now: Tensor
) -> tuple[Tensor, Tensor]:
    """Changed ids and their handles, in one pass over the index."""
    slab = tables.config.slab_of(table)
    found = ops.changed_ids_(
        tables.index,
        tables.rows.generations[slab],
        tables.rows.dirty_bits[slab],
        before,
        now,
        table=table,
        reader=reader.bit,
    )
    return found.ids, found.handles


def _compared(
    tables: Tables, reader: ChangeReader, table: int, before: Tensor, now: Tensor
) -> tuple[Tensor, Tensor]:
    """The same by operations that every device has."""
    slab = tables.config.slab_of(table)
    dirty, generations = tables.rows.dirty_bits[slab], tables.rows.generations[slab]
    ids, handles = [_no_ids(tables)], [_no_ids(tables)]
    for batch in exported(tables, table, _IDS_AT_ONCE):
        rows = batch.handles >> GENERATION_BITS
        owners = [batch.ids[:, None], torch.full_like(batch.ids, table + 1)[:, None]]
        own = torch.cat([*owners, batch.scores] if reader.scores else owners, 1)
        # a row that was never written has no dirty bit
        written = generations[rows] == (batch.handles & _GENERATIONS).to(torch.int32)
        here = ((dirty[rows] & reader.bit) != 0) | ~written | (before[rows] != own).any(1)
        now[rows] = own
        ids.append(batch.ids[here])
        handles.append(batch.handles[here])
    return torch.cat(ids), torch.cat(handles)


def _find_removed(
    tables: Tables, reader: ChangeReader, slab: int, now: Tensor, changed: list[ChangedIds]
) -> None:
    """Ids whose row has another owner are gone, or have another row."""
    if slab >= len(reader.owners):
        return
    before = reader.owners[slab][:, :2]
    both = min(before.shape[0], now.shape[0])
    left = torch.ones_like(before[:, 0], dtype=torch.bool)
    left[:both] = (before[:both] != now[:both, :2]).any(1)
    lost = before[left]
    for table in _tables_of(tables, slab):
        ids = lost[lost[:, 1] == table + 1, 0]
        if ids.numel() > 0:
            handles = find(tables, *one_table(tables, table, ids)).handles
            ids = ids[handles < 0]
        changed[table] = changed[table]._replace(removed=ids)


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
    """A reader that :func:`record_changes` has made for these tables, if it has.

    Args:
        tables: of the group.
        name: whose reader it is.
    """
    return tables.host.readers.get(name)


def record_changes(tables: Tables, name: str, *, scores: bool) -> ChangeReader:
    """Has changes recorded for a reader from now on; between two training steps.

    The first reader adds dirty bits to what updates are given: compiled code is compiled again, and
    CUDA graphs must be captured again. A second call with the same name gives the same reader.

    Args:
        tables: of the group.
        name: whose reader it is.
        scores: changed scores count as changes.

    Raises:
        RuntimeError: rows lie in a store, or there are eight readers.
    """
    tables.check_own()
    tables.check_in_memory(
        "record_changes",
        "save them with torch_dynemb.checkpoint.save_snapshot, which writes what has changed",
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
    with defer_signals():
        if not tables.rows.dirty_bits:
            dirty_bits = [
                tables.memory.reserve((weights.shape[0],), torch.uint8, huge_pages=False)
                for weights in tables.rows.weights
            ]
            mark_static(dirty_bits)
            # the device knows them before any update is given them
            tables.memory.bind(tables.index, tables.rows._replace(dirty_bits=dirty_bits))
            # the list itself is what modules and optimizers hold
            tables.rows.dirty_bits.extend(dirty_bits)
        host.readers[name] = ChangeReader(name, free[0], scores)
    return host.readers[name]


def stop_recording(tables: Tables, name: str) -> None:
    """Forgets a reader, whose place another one may take; dirty bits of rows stay and mean nothing.

    Args:
        tables: of the group.
        name: whose reader it is; there may be none.
    """
    tables.check_own()
    tables.host.readers.pop(name, None)


__all__ = [
    "ChangeReader",
    "ChangedIds",
    "ChangedRows",
    "Changes",
    "copy_rows",
    "mark_changed",
    "read_changes",
    "reader_of",
    "record_changes",
    "stop_recording",
    "take_changes",
]
