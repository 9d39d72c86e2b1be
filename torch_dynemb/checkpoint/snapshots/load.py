"""Loading of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from torch_dynemb.argument_checks import described
from torch_dynemb.checkpoint.loading.load import LoadedTable, LoadReport, load_parts
from torch_dynemb.checkpoint.manifest.file import read_manifest
from torch_dynemb.checkpoint.manifest.records import Manifest
from torch_dynemb.checkpoint.saving.handle import check_none_running
from torch_dynemb.checkpoint.snapshots.group_state import (
    SnapshotState,
    give_up,
    put_back,
    read_state,
)
from torch_dynemb.checkpoint.snapshots.kept import (
    clean,
    goes_on_from,
    snapshots_of,
)
from torch_dynemb.checkpoint.snapshots.places import (
    MANIFEST,
    MODEL,
    StoredGroup,
    checked_name,
    first_store,
    index_folder,
    snapshot_folder,
    stored_groups,
)
from torch_dynemb.checkpoint.snapshots.records import REMEDY, Snapshot, read_store
from torch_dynemb.distributed.together import Ranks, ranks_of
from torch_dynemb.errors import DamagedFileError, DamagedStoreError
from torch_dynemb.files.disk import Disk
from torch_dynemb.parts.table_parts import TablePart, groups_of, parts_of
from torch_dynemb.process.torch_modes import plain_torch

_DISK = Disk()


class _Chosen(NamedTuple):
    """Facts about the snapshot to load that all ranks share.

    Attributes:
        snapshot: the snapshot.
        there: uuids of all existing snapshots.
        first: directory of the first store.
        first_rank: rank with that store.
    """

    snapshot: Snapshot
    there: list[str]
    first: Path
    first_rank: int


def snapshots(model: nn.Module | str | PathLike[str]) -> list[str]:
    """List the names of the snapshots of a model; the last one is the newest.

    Args:
        model: model with rows on disks, or the path of its first store.

    Raises:
        TypeError: it is neither.
        DamagedStoreError: a file is damaged.
    """
    store = first_store("snapshots", model)
    return [] if store is None else [snapshot.name for snapshot in snapshots_of(store)]


@plain_torch()
def load_snapshot(
    model: nn.Module,
    name: str | None = None,
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> LoadReport:
    """Restore a snapshot. All ranks call it together.

    Tables, and with them all later results, are bit for bit what they were. The model must have the
    same tables, optimizers, policies and ranks as when the snapshot was saved. Hyper-parameters
    stay those of the model, as with :func:`load`. What the stores wrote after the snapshot is
    deleted. Other snapshots stay.

    Args:
        model: model between two training steps, with stores at the paths of the snapshot.
        name: name of the snapshot; default: the newest one.
        strict: for what lies outside stores, as in :func:`load`.
        process_group: ranks that load together; default: all.
        progress: show a progress bar for what lies outside stores; default: if the standard error
            is a terminal.

    Returns:
        As :func:`load`; ``state`` is that given to :func:`save_snapshot`.

    Raises:
        TypeError, ValueError: a wrong argument, or what lies outside stores does not fit the model.
        FileNotFoundError: the snapshot does not exist.
        DamagedStoreError: a file of it is missing or damaged.
        UnsupportedFormatError: it has another version.
        RuntimeError: it is of other tables, or of another number of ranks. In all these cases all
            ranks raise, and the model is unchanged. A RuntimeError is also raised if memory or the
            disk fails while tables are replaced: these are empty then.
    """
    ranks = ranks_of(process_group)

    def prepare() -> tuple[list[TablePart], list[StoredGroup]]:
        if not isinstance(model, nn.Module):
            raise TypeError(f"load_snapshot: model is {described(model)}, expected a Module")
        if name is not None:
            checked_name("load_snapshot", name)
        check_none_running()
        parts = parts_of(model)
        for group in groups_of(parts):
            group.tables.check_own()
        return parts, stored_groups("load_snapshot", parts)

    parts, stores = ranks.run(prepare)
    ranks.agree("load_snapshot", name=name, strict=strict)
    chosen = _chosen(ranks, stores, name)
    states = ranks.run(lambda: _states(stores, chosen))
    model_folder = index_folder(chosen.first) / chosen.snapshot.uuid / MODEL
    manifest = ranks.run(lambda: _manifest(model_folder))
    stored_ids = {id(stored.group) for stored in stores}
    in_memory = [part for part in parts if id(part.group) not in stored_ids]
    try:
        report = load_parts(
            ranks,
            "load_snapshot",
            model_folder,
            manifest,
            in_memory,
            model,
            strict=strict,
            progress=progress,
            finish=lambda: _put_back(states),
        )
    except DamagedFileError as error:
        raise DamagedStoreError(f"load_snapshot: {error}: {REMEDY}", path=error.path) from error
    if ranks.rank == chosen.first_rank:
        goes_on_from(stores[0].tiers, chosen.snapshot)
    ranks.run(lambda: _clean(stores, chosen))
    own = [
        (part.name, part.group.size(part.table)) for part in parts if id(part.group) in stored_ids
    ]
    tables = dict(report.tables)
    for of_rank in ranks.gather(own):
        for table, ids in of_rank:
            before = tables[table].ids if table in tables else 0
            tables[table] = LoadedTable(before + ids, 0, (), True)
    return report._replace(uuid=chosen.snapshot.uuid, tables=tables)


def _chosen(ranks: Ranks, stores: Sequence[StoredGroup], name: str | None) -> _Chosen:
    gathered = ranks.gather([str(stored.path) for stored in stores])
    first_rank = next((rank for rank, paths in enumerate(gathered) if paths), None)
    if first_rank is None:
        raise RuntimeError(
            "load_snapshot: no table of the model has storage=SSDStore(...), which a "
            "snapshot needs: use torch_dynemb.checkpoint.load"
        )
    first = Path(gathered[first_rank][0])

    def choose() -> tuple[Snapshot, list[str]] | None:
        if ranks.rank != first_rank:
            return None
        there = snapshots_of(first)
        named = [snapshot for snapshot in there if name is None or snapshot.name == name]
        if not named:
            names = [snapshot.name for snapshot in there]
            raise FileNotFoundError(
                f"load_snapshot: {snapshot_folder(first)} has no snapshot"
                f"{'' if name is None else f' {name!r}'}: it has {names}"
            )
        return named[-1], [snapshot.uuid for snapshot in there]

    found = ranks.gather(ranks.run(choose))[first_rank]
    assert found is not None
    snapshot, there = found
    count = sum(len(paths) for paths in gathered)
    if (snapshot.ranks, snapshot.stores) != (ranks.size, count):
        raise RuntimeError(
            f"load_snapshot: {snapshot_folder(first) / snapshot.name} was saved by "
            f"{snapshot.ranks} ranks with {snapshot.stores} stores, but the model has {ranks.size} "
            f"with {count}: load it with as many, and save it with torch_dynemb.checkpoint.save, "
            "which any number of ranks loads"
        )
    return _Chosen(snapshot, there, first, first_rank)


def _states(stores: Sequence[StoredGroup], chosen: _Chosen) -> list[SnapshotState]:
    """Read the states of this rank's stores."""
    result = []
    for stored in stores:
        folder = index_folder(stored.path) / chosen.snapshot.uuid
        if not folder.is_dir():
            raise DamagedStoreError(
                f"load_snapshot: {stored.path} has no files of snapshot {chosen.snapshot.name!r}: "
                "its tables were not part of the model, or the directory was replaced: copy "
                "it back, or load another snapshot",
                path=stored.path,
            )
        result.append(read_state(stored, folder, read_store(folder / MANIFEST)))
    return result


def _manifest(folder: Path) -> Manifest:
    try:
        return read_manifest(folder)
    except (FileNotFoundError, DamagedFileError) as error:
        raise DamagedStoreError(f"load_snapshot: {error}: {REMEDY}", path=folder) from error


def _put_back(states: Sequence[SnapshotState]) -> None:
    """Restore the tables of this rank. On failure all of them are cleared."""
    with ExitStack() as locks:
        for state in states:
            locks.enter_context(state.stored.group.tables.changing(moves_rows=True))
        try:
            for state in states:
                put_back(state)
        except BaseException:
            for state in states:
                give_up(state)
            raise


def _clean(stores: Sequence[StoredGroup], chosen: _Chosen) -> None:
    for stored in stores:
        clean(_DISK, stored, chosen.first, chosen.there)


__all__ = ["load_snapshot", "snapshots"]
