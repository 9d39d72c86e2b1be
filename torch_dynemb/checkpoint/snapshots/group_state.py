"""State of a group without the rows in its store: written to a file, and restored.

A file has three kinds of entries:

* the entries of ``table.state``,
* the places of row records, by slab,
* the evicted ids that no call has taken yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.checkpoint.saving.table_files import Folder
from torch_dynemb.checkpoint.snapshots.places import STATE, StoredGroup, segment_file
from torch_dynemb.checkpoint.snapshots.records import REMEDY, SavedSegments, SavedStore, damaged
from torch_dynemb.errors import DamagedFileError, DamagedStoreError
from torch_dynemb.files.checksummed_files import read_tensors
from torch_dynemb.parts.saved_tables import SavedFile
from torch_dynemb.table import state as table_state
from torch_dynemb.table.clock import propose
from torch_dynemb.table.tables import Tables

_EVICTED = "evicted"  # int64 [1 + n, 4], evicted ids that no call has taken
_PAGE = 4096
_OTHER_TABLES = (
    "construct the tables as they were when it was saved, or use a checkpoint of "
    "torch_dynemb.checkpoint.save, which other tables can load"
)


def _records(slab: str) -> str:
    """Return the name of the entry with the places of a slab's records, int64 [rows]."""
    return f"records/{slab}"


def _evicted_rows(table: str) -> str:
    """Return the name of the entry with rows of evicted ids, float32 [n, dim]."""
    return f"evicted_rows/{table}"


# -- saving --------------------------------------------------------------------------------------


def write_state(folder: Folder, stored: StoredGroup, rows: ops.StoreSnapshot) -> SavedFile:
    """Write the file of a group.

    Args:
        folder: destination.
        stored: the group.
        rows: result of syncing the store.
    """
    tables = stored.group.tables
    entries = dict(table_state.used_tensors(tables))
    for slab, records in zip(tables.config.slabs, rows.records, strict=True):
        entries[_records(slab.name)] = records
    entries.update(_pending_evictions(tables))
    entries["format"] = table_state.format_entry(tables)
    return folder.write(STATE, entries, 0)


def _pending_evictions(tables: Tables) -> dict[str, Tensor]:
    evicted = tables.index.evicted
    count = min(int(evicted[0, 0]), evicted.shape[0] - 1)
    entries = {_EVICTED: evicted[: 1 + count]}
    for table, kept in zip(tables.config.tables, tables.evictions.rows or (), strict=False):
        empty = torch.empty(0, table.embedding_dim, device="cpu")
        entries[_evicted_rows(table.name)] = torch.cat([empty, *kept])
    return entries


def saved_segments(stored: StoredGroup, rows: ops.StoreSnapshot) -> list[SavedSegments]:
    """List the files of rows, by slab.

    Args:
        stored: the group.
        rows: result of syncing the store.
    """
    saved = []
    for slab, pairs in zip(stored.group.config.slabs, rows.segments, strict=True):
        places, files = pairs.view(-1, 2).t().tolist() if pairs.numel() > 0 else ([], [])
        headers = [_header(segment_file(stored.path, slab.name, number)) for number in files]
        size = stored.tiers.storage.segment_bytes
        saved.append(SavedSegments(slab.name, size, places, files, headers))
    return saved


def _header(path: Path) -> int:
    """Return the crc32c of the first page of a file."""
    with path.open("rb") as file:
        return ops.crc32c(torch.frombuffer(bytearray(file.read(_PAGE)), dtype=torch.uint8))


# -- loading -------------------------------------------------------------------------------------


class SnapshotState(NamedTuple):
    """State that a group goes back to, read and checked.

    Attributes:
        stored: the group.
        record: record of the snapshot in the store.
        entries: entries of the tables.
        rows: rows of the store.
        evicted: entries of evicted ids.
    """

    stored: StoredGroup
    record: SavedStore
    entries: Mapping[str, Tensor]
    rows: ops.StoreSnapshot
    evicted: Mapping[str, Tensor]


def read_state(stored: StoredGroup, folder: Path, record: SavedStore) -> SnapshotState:
    """Read and check the state that a group goes back to. Changes nothing.

    Args:
        stored: the group.
        folder: folder with its file.
        record: record of the snapshot in the store.

    Raises:
        DamagedStoreError: a file is missing or damaged.
        RuntimeError: it is the snapshot of other tables.
    """
    path = folder.parent / record.state.path
    tables = stored.group.tables
    slabs = [slab.name for slab in tables.config.slabs]
    try:
        entries = read_tensors(path, record.state.sums)
    except DamagedFileError as error:
        raise DamagedStoreError(f"{error}: {REMEDY}", path=path) from error
    rows = {name: entries.pop(name) for name in map(_records, slabs) if name in entries}
    of_evicted = [_EVICTED, *map(_evicted_rows, tables.config.names)]
    evicted = {name: entries.pop(name) for name in of_evicted if name in entries}
    try:
        entries = dict(table_state.in_own_order(tables, entries))
        table_state.check(tables, entries)
        _check_evicted(tables, evicted)
    except ValueError as error:
        raise RuntimeError(f"load_snapshot: {path}: {error}; or {_OTHER_TABLES}") from error
    if [of.slab for of in record.segments] != slabs:
        saved = [of.slab for of in record.segments]
        raise RuntimeError(
            f"load_snapshot: {folder} has rows {saved}, but the tables have {slabs}: "
            f"{_OTHER_TABLES}"
        )
    for of in record.segments:
        _check_segments(stored, of)
    segments = [_pairs(of.places, of.files) for of in record.segments]
    in_store = ops.StoreSnapshot([rows[_records(slab)] for slab in slabs], segments)
    return SnapshotState(stored, record, entries, in_store, evicted)


def _pairs(places: list[int], files: list[int]) -> Tensor:
    return (
        torch.tensor([places, files], dtype=torch.int64, device="cpu").t().reshape(-1).contiguous()
    )


def _check_segments(stored: StoredGroup, segments: SavedSegments) -> None:
    """Raise an error if a file is missing or was replaced."""
    own = stored.tiers.storage.segment_bytes
    if segments.files and segments.bytes != own:
        raise RuntimeError(
            f"load_snapshot: {stored.path} has files of {segments.bytes} bytes, but the tables "
            f"have segment={own}: construct them with segment={segments.bytes}"
        )
    for number, header in zip(segments.files, segments.headers, strict=True):
        path = segment_file(stored.path, segments.slab, number)
        if not path.is_file():
            raise damaged(path, "the file is missing")
        size = path.stat().st_size
        if size != segments.bytes:
            raise damaged(path, f"the file has {size} bytes, expected {segments.bytes}")
        if _header(path) != header:
            raise damaged(path, "the first page is damaged or belongs to another file")


def _check_evicted(tables: Tables, evicted: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the tables have too little room for the evicted ids of the snapshot."""
    count = evicted[_EVICTED].shape[0] - 1
    room = tables.index.evicted.shape[0] - 1
    rows = len(evicted) > 1
    if count > 0 and (count > room or rows != (tables.evictions.rows is not None)):
        raise ValueError(
            f"the snapshot has {count} pending evicted ids, "
            f"{'with' if rows else 'without'} their rows, but the tables have room for {room}: "
            f"call evicted.record({count}, rows={rows}) on them first"
        )


def put_back(state: SnapshotState) -> None:
    """Restore a group. After an error it is in an undefined state: call :func:`give_up`.

    Raises:
        RuntimeError: there is too little memory, or the disk fails.
    """
    tables = state.stored.group.tables
    state.stored.tiers.restore(state.rows)
    table_state.write(tables, state.entries)
    evicted = state.evicted[_EVICTED]
    tables.index.evicted[0].zero_()
    if evicted.shape[0] > 1:
        tables.index.evicted[: evicted.shape[0]].copy_(evicted)
    if tables.evictions.rows is not None:
        tables.evictions.rows = [
            [of] if (of := state.evicted.get(_evicted_rows(name))) is not None else []
            for name in tables.config.names
        ]
    tables.host.batch_scored = set(state.record.batch_scored)
    if state.record.proposed_now is not None:
        propose(tables, state.record.proposed_now)


def give_up(state: SnapshotState) -> None:
    """Clear the tables after :func:`put_back` has failed."""
    table_state.give_up(state.stored.group.tables)


__all__ = [
    "SnapshotState",
    "give_up",
    "put_back",
    "read_state",
    "saved_segments",
    "write_state",
]
