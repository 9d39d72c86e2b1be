"""Rows on a disk: a log for each slab, beneath a cache with slots for some rows.

A store belongs to the group that opened it, and is found by the address of its ``tier_clock``; a
copy of that tensor has no store. The store keeps addresses of tensors, not the tensors: call
:func:`store_close` before they are freed. One thread of the store does all jobs in order. Other
Python threads run while an op waits for it.

If a job fails (the disk fails, a record is damaged), every later call raises its error. A forked
process cannot use the store of its parent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.block_reads import IoPath
from torch_dynemb.ops.columns import STORE_STAT_COLUMNS
from torch_dynemb.ops.tensors import RowTensors, TierTensors


class StoredRecords(NamedTuple):
    """Records of a log.

    Attributes:
        records: uint8 [ids, bytes of a record]; zeros for ids without one.
        found: bool [ids]: whether the log has a record of this owner of the row.
    """

    records: Tensor
    found: Tensor


class StoreSnapshot(NamedTuple):
    """Map from rows to records, by slab; empty for slabs without a log.

    Attributes:
        records: int64 [rows], where the record of each row is.
        segments: int64 [2 * segments], pairs: the segment number used in ``records``, and the
            number of its file.
    """

    records: list[Tensor]
    segments: list[Tensor]


def _as_bytes(text: str | bytes) -> Tensor:
    data = text.encode() if isinstance(text, str) else text
    return torch.tensor(list(data), dtype=torch.uint8, device="cpu")


@raises_typed_errors
def store_open(
    tiers: TierTensors,
    rows: RowTensors,
    *,
    path: str | os.PathLike[str],
    slab_names: Sequence[str],
    tiered: Sequence[int],
    segment_bytes: int,
    disk_bytes: int = 0,
    io: int = IoPath.AUTO,
) -> None:
    """Open the store of a group in a directory; create the directory if needed.

    Existing segments stay as they are until :func:`store_keep` names the needed ones.

    Args:
        tiers: the caches of the group. The address of their ``clock`` identifies the store.
        rows: of the group; those of tiered slabs have a row for each slot.
        path: the directory. Only one store at a time may use it.
        slab_names: distinct names of the slabs: letters, digits, ``.``, ``_`` and ``-``.
        tiered: for each slab, 1 if it has a log, else 0; at least one has.
        segment_bytes: of a file, a multiple of 4096 up to 4 GiB, with room for a record.
        disk_bytes: most bytes of all files together, at least four segments for each slab with a
            log. 0: no bound but the file system's; files then take about twice the rows.
        io: how blocks are read, an :class:`IoPath`.

    Raises:
        RuntimeError: an argument is wrong, io_uring is asked for and unavailable, or the file
            system fails. Or another process uses the directory (its number is named). Or the files
            there have another version, or records or segments of other sizes.
    """
    torch.ops.dynemb.store_open(
        tiers.clock,
        _as_bytes(os.fsencode(path)),
        tiers.places,
        tiers.slots,
        tiers.free_slots,
        rows.weights,
        rows.generations,
        rows.state,
        torch.tensor(list(tiered), dtype=torch.int64, device="cpu"),
        _as_bytes("\n".join(slab_names)),
        segment_bytes,
        disk_bytes,
        int(io),
    )


@raises_typed_errors
def store_read(
    tier_clock: Tensor, slab: int, handles: Tensor, ids: Tensor, *, pin: int | None = None
) -> StoredRecords:
    """Copy records from the log of a slab, after all jobs. The cache is not read.

    Args:
        tier_clock: of the store, as it was opened.
        slab: number of a slab with a log.
        handles: int64 [ids], row handles.
        ids: int64 [ids], owners of the rows.
        pin: of :func:`store_pin`: copy records as they were when they were pinned, without waiting
            for jobs; another thread may train meanwhile.

    Returns:
        The records, with their checksums verified.

    Raises:
        RuntimeError: no store, no such pin, slab or row; a record is damaged or of another id (the
            file, the offset and the id are named), or cannot be read.
    """
    return StoredRecords(*torch.ops.dynemb.store_read(tier_clock, slab, handles, ids, pin))


@raises_typed_errors
def store_write(
    tier_clock: Tensor, slab: int, handles: Tensor, ids: Tensor, table: int, records: Tensor
) -> None:
    """Append records to the log of a slab, after all jobs. The cache stays as it is.

    Args:
        tier_clock: of the store, as it was opened.
        slab: number of a slab with a log.
        handles: int64 [ids], row handles.
        ids: int64 [ids], owners of the rows.
        table: number of the ids' table.
        records: uint8 [ids, bytes of a record]; the first 24 bytes, the header, are ignored.

    Raises:
        RuntimeError: no store, no such slab or row; records of another size; the disk is full. In
            the last case nothing has been written; a later call may succeed.
    """
    torch.ops.dynemb.store_write(tier_clock, slab, handles, ids, table, records)


@raises_typed_errors
def store_submit(tier_clock: Tensor, moves: Tensor) -> None:
    """Queue a job that moves rows between slots and the log.

    Rows that it saves must not change before it is done: see :func:`store_drain`.

    Args:
        tier_clock: of the store, as it was opened.
        moves: int64 [moves, 7] (``columns.Move``).

    Raises:
        RuntimeError: no store; a move names an unknown slab; the disk is full; or an earlier job
            has failed. Nothing has been queued.
    """
    torch.ops.dynemb.store_submit(tier_clock, moves)


@raises_typed_errors
def store_erase(tier_clock: Tensor, slab: int, handles: Tensor) -> None:
    """Drop records of rows without an owner, after all jobs.

    Garbage collection of their segments frees the bytes. Snapshots keep them.

    Args:
        tier_clock: of the store, as it was opened.
        slab: number of a slab with a log.
        handles: int64 [rows], row handles; those without a record are skipped.

    Raises:
        RuntimeError: no store, or no such slab or row.
    """
    torch.ops.dynemb.store_erase(tier_clock, slab, handles)


@raises_typed_errors
def store_drain(tier_clock: Tensor) -> None:
    """Wait until all jobs of a store are done.

    Args:
        tier_clock: of the store, as it was opened.

    Raises:
        RuntimeError: no store, or a job has failed.
    """
    torch.ops.dynemb.store_drain(tier_clock)


@raises_typed_errors
def store_check(tier_clock: Tensor) -> None:
    """Raise the error of a failed job of a store. Does not wait.

    Args:
        tier_clock: of the store, as it was opened.

    Raises:
        RuntimeError: no store, or a job has failed.
    """
    torch.ops.dynemb.store_check(tier_clock)


@raises_typed_errors
def store_sync(tier_clock: Tensor) -> StoreSnapshot:
    """Make all records durable, after all jobs.

    Their segments stay until :func:`store_keep` omits them.

    Args:
        tier_clock: of the store, as it was opened.

    Returns:
        The snapshot, for :func:`store_load`.

    Raises:
        RuntimeError: no store, or the file system fails.
    """
    return StoreSnapshot(*torch.ops.dynemb.store_sync(tier_clock))


@raises_typed_errors
def store_keep(tier_clock: Tensor, files: Sequence[Tensor]) -> None:
    """Declare which files snapshots need from now on.

    Of the others, files that this store has written are reused when their rows have been written
    again. Files that existed when it was opened are deleted.

    Args:
        tier_clock: of the store, as it was opened.
        files: int64 [files] for each slab, numbers of files.

    Raises:
        RuntimeError: no store, lists that do not fit it, or the file system fails.
    """
    torch.ops.dynemb.store_keep(tier_clock, [numbers.contiguous() for numbers in files])


@raises_typed_errors
def store_load(tier_clock: Tensor, snapshot: StoreSnapshot) -> None:
    """Return to a snapshot, after all jobs. The cache stays as it is.

    Files that the store has written and that no snapshot needs are deleted.

    Args:
        tier_clock: of the store, as it was opened.
        snapshot: of a store of the same path and slabs.

    Raises:
        RuntimeError: no store; a file is missing, short or damaged at its beginning; or the
            snapshot does not fit the store. In these cases nothing has changed. Or the file system
            fails.
    """
    torch.ops.dynemb.store_load(tier_clock, snapshot.records, snapshot.segments)


@raises_typed_errors
def store_pin(tier_clock: Tensor) -> int:
    """Pin the present records, after all jobs, whatever the store does later.

    Their segments stay until :func:`store_release`, whatever :func:`store_keep` says, and
    :func:`store_load` is refused until then. A pin takes 8 bytes of memory for every row, and
    leaves nothing behind when the process ends.

    Args:
        tier_clock: of the store, as it was opened.

    Returns:
        The number of the pin.

    Raises:
        RuntimeError: no store, or the file system fails.
    """
    return int(torch.ops.dynemb.store_pin(tier_clock))


@raises_typed_errors
def store_release(tier_clock: Tensor, pin: int) -> None:
    """Release a pin: segments that neither the store nor a snapshot needs become reusable.

    Does nothing for a failed store (its other calls raise the error) and in a forked process.

    Args:
        tier_clock: of the store, as it was opened.
        pin: of :func:`store_pin`.

    Raises:
        RuntimeError: no store, or no such pin.
    """
    torch.ops.dynemb.store_release(tier_clock, pin)


@raises_typed_errors
def store_stats(tier_clock: Tensor) -> Tensor:
    """Return statistics of a store since it was opened. Does not wait.

    Args:
        tier_clock: of the store, as it was opened.

    Returns:
        int64 [16]; the columns are :class:`torch_dynemb.ops.columns.StoreStat`.

    Raises:
        RuntimeError: no store.
    """
    stats: Tensor = torch.ops.dynemb.store_stats(tier_clock)
    return stats


@raises_typed_errors
def store_close(tier_clock: Tensor) -> None:
    """Finish queued jobs and release the directory. Files stay as they are.

    Args:
        tier_clock: of the store, as it was opened.

    Raises:
        RuntimeError: no store.
    """
    torch.ops.dynemb.store_close(tier_clock)


@register_fake("store_open")
def _store_open_fake(
    tier_clock: Tensor,
    path: Tensor,
    places: Sequence[Tensor],
    slots: Sequence[Tensor],
    free_slots: Sequence[Tensor],
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    state: Sequence[Tensor],
    tiered: Tensor,
    names: Tensor,
    segment_bytes: int,
    disk_bytes: int,
    io: int,
) -> None:
    return None


@register_fake("store_read")
def _store_read_fake(
    tier_clock: Tensor, slab: int, handles: Tensor, ids: Tensor, pin: int | None
) -> tuple[Tensor, Tensor]:
    # only the store knows the size of its records
    record_bytes = torch.library.get_ctx().new_dynamic_size()
    rows = handles.shape[0]
    return (
        handles.new_empty((rows, record_bytes), dtype=torch.uint8),
        handles.new_empty((rows,), dtype=torch.bool),
    )


@register_fake("store_write")
def _store_write_fake(
    tier_clock: Tensor, slab: int, handles: Tensor, ids: Tensor, table: int, records: Tensor
) -> None:
    return None


@register_fake("store_submit")
def _store_submit_fake(tier_clock: Tensor, moves: Tensor) -> None:
    return None


@register_fake("store_erase")
def _store_erase_fake(tier_clock: Tensor, slab: int, handles: Tensor) -> None:
    return None


@register_fake("store_drain")
def _store_drain_fake(tier_clock: Tensor) -> None:
    return None


@register_fake("store_check")
def _store_check_fake(tier_clock: Tensor) -> None:
    return None


@register_fake("store_sync")
def _store_sync_fake(tier_clock: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    def one_of_each_slab() -> list[Tensor]:
        return [
            tier_clock.new_empty((torch.library.get_ctx().new_dynamic_size(),))
            for _ in range(tier_clock.shape[0] - 1)
        ]

    return one_of_each_slab(), one_of_each_slab()


@register_fake("store_keep")
def _store_keep_fake(tier_clock: Tensor, files: Sequence[Tensor]) -> None:
    return None


@register_fake("store_load")
def _store_load_fake(
    tier_clock: Tensor, records: Sequence[Tensor], segments: Sequence[Tensor]
) -> None:
    return None


@register_fake("store_pin")
def _store_pin_fake(tier_clock: Tensor) -> Tensor:
    return tier_clock.new_empty(())


@register_fake("store_release")
def _store_release_fake(tier_clock: Tensor, pin: int) -> None:
    return None


@register_fake("store_stats")
def _store_stats_fake(tier_clock: Tensor) -> Tensor:
    return tier_clock.new_empty((STORE_STAT_COLUMNS,))


@register_fake("store_close")
def _store_close_fake(tier_clock: Tensor) -> None:
    return None
