"""Saving of a snapshot of a model with rows on disks."""

from __future__ import annotations

import os
import uuid as uuids
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.checkpoint.saving.handle import check_none_running
from torch_dynemb.checkpoint.saving.save import (
    begin_reading,
    check_saveable,
    source_of_model,
    write_checkpoint,
)
from torch_dynemb.checkpoint.saving.table_files import Folder
from torch_dynemb.checkpoint.snapshots.group_state import saved_segments, write_state
from torch_dynemb.checkpoint.snapshots.kept import (
    check_records,
    clean,
    forget,
    goes_on_from,
    history,
    outdated,
    snapshots_of,
)
from torch_dynemb.checkpoint.snapshots.places import (
    MANIFEST,
    MODEL,
    StoredGroup,
    checked_name,
    index_folder,
    snapshot_folder,
    stored_groups,
)
from torch_dynemb.checkpoint.snapshots.records import SavedStore, Snapshot, write_record
from torch_dynemb.distributed.together import Ranks, ranks_of
from torch_dynemb.files.checksummed_files import space_errors
from torch_dynemb.files.disk import Disk
from torch_dynemb.parts.table_parts import TablePart, groups_of, parts_of
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.process.torch_modes import plain_torch

_DISK = Disk()


class _Plan(NamedTuple):
    """Facts about the new snapshot that all ranks share.

    Attributes:
        snapshot: the new snapshot.
        first: directory of the first store.
        there: existing snapshots, ascending.
        first_rank: rank with that store.
    """

    snapshot: Snapshot
    first: Path
    there: list[Snapshot]
    first_rank: int


@plain_torch()
def save_snapshot(
    model: nn.Module,
    name: str,
    *,
    state: Mapping[str, Any] | None = None,
    keep_last: int = 1,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> None:
    """Save a model with rows on disks, beside these rows. All ranks call it together.

    Changed rows are written to the store; others are there already. So a snapshot takes the time
    and space of changed rows and of the index. What lies outside stores (other tables, the dense
    state, ``state``) is saved as by :func:`save`. The snapshot appears as a whole or not at all:
    after a crash, the one before is still there. :func:`load_snapshot` resumes from it bit for bit,
    with the same number of ranks and the same tables. For other ranks or tables, and for backups on
    another disk, use :func:`save`.

    It lies in the ``path`` of the stores. A file in ``snapshots/`` of the first store names it.
    Deleting that file deletes the snapshot, and the next save frees its space.

    Args:
        model: model between two training steps; at least one table has an :class:`SSDStore`.
        name: letters, digits, ``.``, ``_`` and ``-``. A snapshot of this name that the tables
            continue is replaced once the new one is whole.
        state: other values that the program needs to resume; see :func:`save`.
        keep_last: number of snapshots that stay of those that the tables were saved as or continue,
            the new one included. Others are never deleted: a model that was not loaded from the
            snapshots of its directory leaves them there, with their space.
        process_group: ranks that save together; default: all.
        progress: show a progress bar for what lies outside stores; default: if the standard error
            is a terminal.

    Raises:
        TypeError, ValueError: a wrong argument, or a ``state`` that :func:`save` rejects.
        FileExistsError: a snapshot of this name exists that the tables do not continue.
        InUseError: another thread trains or changes the model.
        RuntimeError: no table has a store, or one has an :class:`ExternalStore`; gradients are
            pending for an optimizer's ``step()``; or a disk with rows fails.
        DamagedStoreError: a file of another snapshot is damaged.
        DiskFullError: the disk is full.
        OSError: the disk fails. In all cases all ranks raise, earlier snapshots are unchanged, and
            training can continue. One exception: if rows could not be written, every later call
            raises that.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> folder = tempfile.TemporaryDirectory()
        >>> storage = td.SSDStore(folder.name + "/rows", segment="64KiB")
        >>> bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), storage=storage)
        >>> bag(torch.tensor([[1, 2], [3, 1]])).sum().backward()
        >>> bag.optimizer.step()
        >>> td.checkpoint.save_snapshot(bag, "step-1", state={"epoch": 1})
        >>> td.checkpoint.snapshots(bag)
        ['step-1']
        >>> bag(torch.tensor([[4, 5]])).sum().backward()
        >>> bag.optimizer.step()
        >>> td.checkpoint.load_snapshot(bag).state
        {'epoch': 1}
        >>> bag.group.size(0)
        3
        >>> del bag; folder.cleanup()
    """
    ranks = ranks_of(process_group)
    disk = _DISK

    def prepare() -> tuple[list[TablePart], list[StoredGroup]]:
        if not isinstance(model, nn.Module):
            raise TypeError(f"save_snapshot: model is {described(model)}, expected a Module")
        checked_name("save_snapshot", name)
        integer("save_snapshot: keep_last", keep_last, least=1)
        check_none_running()
        parts = parts_of(model)
        stores = stored_groups("save_snapshot", parts)
        for group in groups_of(parts):
            check_saveable("save_snapshot", group)
        for stored in stores:
            check_records(stored.path)  # before anything is written
        return parts, stores

    parts, stores = ranks.run(prepare)
    ranks.agree("save_snapshot", name=name, keep_last=keep_last)
    plan = _planned(ranks, stores, name)
    stored_ids = {id(stored.group) for stored in stores}
    in_memory = [part for part in parts if id(part.group) not in stored_ids]
    dense, reading = ranks.run(lambda: begin_reading("save_snapshot", parts, model))
    source = ranks.run(lambda: source_of_model(in_memory, dense, state, ranks))
    naming = False
    try:
        # so that no crash brings back a name after its rows are deleted
        ranks.run(lambda: _sync_names(disk, plan) if _is_first(ranks, plan) else None)
        ranks.run(lambda: _write(disk, ranks, plan, stores))
        uuid = plan.snapshot.uuid
        model_folder = index_folder(plan.first) / uuid / MODEL
        write_checkpoint(ranks, disk, model_folder, uuid, source, progress)
        ranks.run(reading.check)
        with defer_signals():
            # set before the first rank may begin: others cannot know whether the snapshot exists
            naming = True
            ranks.gather(None)
            ranks.run(lambda: _name(disk, plan, stores[0]) if _is_first(ranks, plan) else None)
    except BaseException:
        first = _is_first(ranks, plan)
        if not naming or (first and plan.snapshot.uuid not in history(stores[0].tiers)):
            _abandon(disk, plan, stores)
        raise
    with defer_signals():
        removed = outdated(plan.there, plan.snapshot, keep_last)
        ranks.run(lambda: forget(disk, plan.first, removed) if _is_first(ranks, plan) else None)
        _clean_all(ranks, disk, plan, stores, removed)


def _is_first(ranks: Ranks, plan: _Plan) -> bool:
    return ranks.rank == plan.first_rank


def _planned(ranks: Ranks, stores: Sequence[StoredGroup], name: str) -> _Plan:
    """Plan the snapshot; the rank with the first store knows the existing ones."""
    gathered = ranks.gather((uuids.uuid4().hex, [str(stored.path) for stored in stores]))
    first_rank = next((rank for rank, (_, paths) in enumerate(gathered) if paths), None)
    if first_rank is None:
        raise RuntimeError(
            "save_snapshot: no table of the model has storage=SSDStore(...), which a "
            "snapshot needs: use torch_dynemb.checkpoint.save"
        )

    def look() -> tuple[list[Snapshot], set[str]]:
        if ranks.rank != first_rank:
            return [], set()
        there, own = snapshots_of(stores[0].path), history(stores[0].tiers)
        taken = [of for of in there if of.name == name and of.uuid not in own]
        if taken:
            raise FileExistsError(
                f"save_snapshot: {stores[0].path} has a snapshot {name!r} that the tables do not "
                "continue: give another name, load that one first, or delete "
                f"{snapshot_folder(stores[0].path) / name}"
            )
        return there, own

    there, own = ranks.gather(ranks.run(look))[first_rank]
    number = max((of.number for of in there), default=0) + 1
    known = [of.uuid for of in there if of.uuid in own]
    count = sum(len(paths) for _, paths in gathered)
    snapshot = Snapshot(name, gathered[0][0], number, ranks.size, count, known)
    return _Plan(snapshot, Path(gathered[first_rank][1][0]), there, first_rank)


def _write(disk: Disk, ranks: Ranks, plan: _Plan, stores: Sequence[StoredGroup]) -> None:
    """Make rows durable, and write the files of this rank's stores. No name needs them yet."""
    for stored in stores:
        clean(disk, stored, plan.first, {of.uuid for of in plan.there})
    for stored in stores:
        rows = stored.tiers.sync()
        index = index_folder(stored.path)
        folder = index / plan.snapshot.uuid
        with space_errors(folder):
            disk.make_folder(index)
            disk.make_folder(folder)
        with Folder(disk, folder, ranks.rank, ranks.size, lambda _: None) as to:
            file = write_state(to, stored, rows)
        host = stored.group.tables.host
        record = SavedStore(
            plan.snapshot.uuid,
            os.path.relpath(plan.first, stored.path),
            file,
            saved_segments(stored, rows),
            sorted(host.batch_scored),
            None if host.proposed_now is None else int(host.proposed_now),
        )
        write_record(disk, folder / MANIFEST, record)
        for changed in (folder, index, stored.path):
            disk.sync_folder(changed)


def _sync_names(disk: Disk, plan: _Plan) -> None:
    folder = snapshot_folder(plan.first)
    if folder.is_dir():
        for draft in folder.glob(".*.tmp-*"):  # of dead saves
            draft.unlink()
        disk.sync_folder(folder)


def _name(disk: Disk, plan: _Plan, first: StoredGroup) -> None:
    """Write the file that makes the snapshot exist; the tables then continue it."""
    folder = snapshot_folder(plan.first)
    disk.make_folder(folder)
    disk.sync_folder(plan.first)
    write_record(disk, folder / plan.snapshot.name, plan.snapshot)
    goes_on_from(first.tiers, plan.snapshot)
    disk.sync_folder(folder)


def _clean_all(
    ranks: Ranks,
    disk: Disk,
    plan: _Plan,
    stores: Sequence[StoredGroup],
    removed: Sequence[Snapshot],
) -> None:
    left = {of.uuid for of in plan.there if of not in removed and of.name != plan.snapshot.name}

    def work() -> None:
        for stored in stores:
            clean(disk, stored, plan.first, {*left, plan.snapshot.uuid})

    ranks.run(work)


def _abandon(disk: Disk, plan: _Plan, stores: Sequence[StoredGroup]) -> None:
    """Delete what was written, after a failure, as far as the disk allows."""
    with defer_signals():
        try:
            there = {of.uuid for of in plan.there}
            for stored in stores:
                clean(disk, stored, plan.first, there)
        except (OSError, RuntimeError):
            pass  # the next save deletes the rest; the caller raises the error


__all__ = ["save_snapshot"]
