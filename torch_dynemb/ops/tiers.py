"""Ops on the cache of tiered tables: which rows are in memory, and which move for a lookup.

The rows of a tiered slab lie in a store, such as files on an SSD, and some of them in *slots* of a
cache: ``weights``, ``generations`` and ``state`` have a row for each slot. The index gives handles
of rows. Ops here turn them into handles of slots (slot: 36 bits, the slot's own generation: 28),
which ops that read or change rows take as they are. The handle of a slot becomes stale when the
slot gets another row.

On a GPU, slots lie in its own memory (HBM), and host memory has a *home* for every row, in the same
tensors behind the slots. Rows without a slot are used at their home: handles name either.

Errors in arguments are raised before anything changes. Ops that return or take moves are of the
CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.columns import MOVE_COLUMNS, Pooling
from torch_dynemb.ops.functional_copies import refuse_copies
from torch_dynemb.ops.index import check_ids
from torch_dynemb.ops.recomputation import always_saved
from torch_dynemb.ops.tensors import IndexTensors, LookupBatch, RowTensors, TierTensors

RECORD_HEADER = 24  # bytes
RECORD_ALIGNMENT = 8


class StagedIds(NamedTuple):
    """Ids of a lookup that needs their rows in the cache.

    Attributes:
        meta: int64 [T, 16], constants of the tables.
        ids: int64 [N].
        handles: int64 [N], of rows, returned by the index for these ids.
        offsets: int64 [F * B + 1], or empty; see :mod:`torch_dynemb.ops.index`.
        feature_tables: F numbers of tables.
    """

    meta: Tensor
    ids: Tensor
    handles: Tensor
    offsets: Tensor
    feature_tables: Sequence[int]

    @classmethod
    def of(cls, meta: Tensor, batch: LookupBatch, handles: Tensor) -> StagedIds:
        """Take the ids of a lookup.

        Args:
            meta, handles: see :class:`StagedIds`.
            batch: ids and settings of the lookup.
        """
        return cls(meta, batch.ids, handles, batch.offsets, batch.feature_tables)


class PlannedMoves(NamedTuple):
    """Result of :func:`plan_moves_`.

    Attributes:
        handles: int64 [N], of slots; negative ones are those of the argument.
        moves: int64 [moves, 7] (``columns.Move``): first the rows that move from their slots to the
            store, then those that move into slots.
    """

    handles: Tensor
    moves: Tensor


_HANDLES = StagedIds._fields.index("handles")


def _arguments(tiers: TierTensors, staged: StagedIds) -> tuple[Any, ...]:
    """Return the first arguments of ops that plan moves."""
    return *tiers, *staged[:-1], list(staged.feature_tables)


def record_bytes(row_bytes: int) -> int:
    """Return the bytes of a record: header, row, optimizer state, and zeros up to a word.

    Args:
        row_bytes: of weights and optimizer state of a row.
    """
    return -(-(RECORD_HEADER + row_bytes) // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


@raises_typed_errors
def reserve_space_(tiers: TierTensors, index: IndexTensors, batch: LookupBatch) -> None:
    """Reserve disk space for the rows that a training lookup is about to push out.

    It precedes :func:`torch_dynemb.ops.find_or_insert_`, so that a step without disk space has
    counted no ids and can be repeated. :func:`stage_` then uses the space. The reservation is
    pessimistic: every new id counts as a row, even if admission refuses it.

    Args:
        tiers: of the tables. Nothing changes; the clock and the index's ``tables`` are declared as
            changed, which keeps compiled code in this order.
        index: of the tables.
        batch: ids and settings of the lookup.

    Raises:
        TypeError, ValueError: dtype, shape or device of ids or offsets.
        RuntimeError: the disk is full or has failed; values of an argument are wrong; the tensors
            have no open store; or another thread uses the cache. Nothing has changed.
    """
    check_ids("reserve_space_", index, batch.ids, batch.offsets)
    torch.ops.dynemb.reserve_space_(
        tiers.clock, index.buckets, index.tables, index.meta, *batch.index_arguments
    )


@raises_typed_errors
def bind_tiers(
    index: IndexTensors,
    tiers: TierTensors,
    rows: RowTensors,
    *,
    fraction: float,
    limits: Sequence[int] = (),
    host_bytes: int | None,
) -> None:
    """Give rows of a group on a GPU a cache in HBM, and homes in host memory.

    Slabs with rows in ``tiers.slots`` get one: the first rows of their tensors become slots, the
    others are homes. Without others, rows lie in a store (:func:`take_slots_`). Call it once, after
    :func:`bind_group` and before the first id. Later calls find the cache by the address of
    ``tiers.clock``.

    Args:
        index: of the tables, on a GPU; no value changes.
        tiers: all zeros, made by :func:`reserve_cuda` except the clock: places int32 [rows], slots
            int64 [slots, 4] and free_slots int32 [slots] of each slab; the clock changes.
        rows: of the tables: [slots + rows, ...] for slabs with a cache, or [slots, ...].
        fraction: of the current rows that get a slot, up to 1; the cache grows with the rows, as
            far as HBM has room. 0: all slots get memory at once.
        limits: for each slab, the slots that get memory at once if ``fraction`` is 0; none: all.
        host_bytes: upper bound of the host memory of homes; None: what the machine has.

    Raises:
        RuntimeError: tensors do not fit each other or were not reserved, the rows have been split
            or have a cache, or memory is short.
    """
    torch.ops.dynemb.bind_tiers(
        index.buckets,
        *tiers,
        rows.weights,
        rows.generations,
        rows.state,
        fraction,
        list(limits),
        -1 if host_bytes is None else host_bytes,
    )


@raises_typed_errors
def end_epoch_(tiers: TierTensors) -> None:
    """End a training step for the cache of a GPU: rows of its lookups may lose their slots.

    Args:
        tiers: of the tables; the clock changes.

    Raises:
        RuntimeError: the clock is not that of :func:`bind_tiers`.
    """
    torch.ops.dynemb.end_epoch_(tiers.clock)


@raises_typed_errors
def stage_(
    tiers: TierTensors,
    staged: StagedIds,
    *,
    trains: bool,
) -> Tensor:
    """Bring the rows of a lookup into the cache, from the store of :func:`store_open`.

    The rows' memory, which the store knows, changes as well. On a GPU, rows come from their homes
    (:func:`bind_tiers`), and those that get no slot are named there.

    Args:
        tiers: of the tables; all tensors change.
        staged: the ids, with the handles of their rows.
        trains: whether the rows will be changed; they then keep their slots until the step ends.

    Returns:
        int64 [N], handles of slots; negative handles and those of rows in memory stay as they are.

    Raises:
        RuntimeError: tensors have no open store, or on a GPU no cache, or do not fit each other;
            nothing has changed. Disk
            (:func:`reserve_space_` checks it earlier) or memory is short; no row has moved. Or a
            row could not be read or written; from then on every call raises this error.
    """
    slots: Tensor = torch.ops.dynemb.stage_(
        *_arguments(tiers, staged),
        trains,
    )
    return slots


@raises_typed_errors
def staged_lookup_(
    tiers: TierTensors, rows: RowTensors, batch: LookupBatch, handles: Tensor
) -> Tensor:
    """Bring the rows of a lookup without training into the cache, and read them.

    The rows keep their slots for this call only, therefore it is a single op. Otherwise a compiler
    could move the read behind a call that reuses the slots.

    Args:
        tiers: of the tables; all tensors change.
        rows: of the tables; slots that receive rows from the store change.
        batch: ids and settings of the lookup.
        handles: int64 [N], of rows, returned by the index for these ids.

    Returns:
        float32 [B, sum of feature_dims], or [N, dim] without pooling.

    Raises:
        RuntimeError: as :func:`stage_`, or an argument does not fit the rows.
    """
    ids, offsets, weights, *features = batch
    output: Tensor = torch.ops.dynemb.staged_lookup_(
        *tiers, *rows.read, ids, handles, offsets, weights, *features
    )
    return output


@raises_typed_errors
def prefetch_(
    tiers: TierTensors,
    staged: StagedIds,
    *,
    ahead: int = 1,
) -> None:
    """Start to bring rows of a later lookup into the cache, and return at once.

    Args:
        tiers, staged: as for :func:`stage_`.
        ahead: how many steps until the lookup, at least 1; the rows keep their slots until then.

    Raises:
        RuntimeError: as :func:`stage_`; later failures are raised by a later call.
    """
    torch.ops.dynemb.prefetch_(
        *_arguments(tiers, staged),
        ahead,
    )


@raises_typed_errors
def plan_moves_(
    tiers: TierTensors,
    staged: StagedIds,
    *,
    trains: bool,
    ahead: int = 0,
) -> PlannedMoves:
    """Decide which rows move for a lookup; the caller moves them before rows are read.

    Args:
        tiers, staged, trains: as for :func:`stage_`.
        ahead: 0: for a lookup now; else as for :func:`prefetch_`.

    Raises:
        RuntimeError: values or shapes of an argument; nothing has changed.
    """
    planned = torch.ops.dynemb.plan_moves_(
        *_arguments(tiers, staged),
        trains,
        ahead,
    )
    return PlannedMoves(*planned)


@raises_typed_errors
def take_dirty_(tiers: TierTensors, slab: int, begin: int, most: int) -> Tensor:
    """Return moves to the store of rows changed since their last save; they count as saved.

    Rows of this step's training lookups still count as changed: their backward may follow.

    Args:
        tiers: of the tables; slots and clock change.
        slab: its number.
        begin: the first slot to look at.
        most: largest number of rows, at least 1.

    Returns:
        int64 [moves, 7] (``columns.Move``), ascending by slot.

    Raises:
        RuntimeError: an argument is out of range, or the slab has no cache.
    """
    moves: Tensor = torch.ops.dynemb.take_dirty_(*tiers, slab, begin, most)
    return moves


@raises_typed_errors
def shrink_cache_(tiers: TierTensors, slab: int, limit: int) -> Tensor:
    """Take the rows out of all slots from ``limit`` on.

    Args:
        tiers: of the tables; all tensors change.
        slab: its number.
        limit: number of slots that stay, at least 0.

    Returns:
        int64 [moves, 7] (``columns.Move``): changed rows, which go to the store.

    Raises:
        RuntimeError: an argument is out of range, or the slab has no cache.
    """
    moves: Tensor = torch.ops.dynemb.shrink_cache_(*tiers, slab, limit)
    return moves


@raises_typed_errors
def forget_rows_(tiers: TierTensors, slab: int, handles: Tensor) -> None:
    """Remove rows from the cache without saving them: the caller writes others to the store.

    Args:
        tiers: of the tables; all tensors change.
        slab: its number.
        handles: int64 [n], of rows; those that are not in the cache are skipped.

    Raises:
        RuntimeError: a handle names no row, or the slab has no cache; nothing has changed.
    """
    torch.ops.dynemb.forget_rows_(*tiers, slab, handles)


@raises_typed_errors
def gather_records(rows: RowTensors, slab: int, slots: Tensor) -> Tensor:
    """Return rows of slots in the format of stores.

    Args:
        rows: of the tables; nothing changes.
        slab: its number.
        slots: int64 [n], from 0.

    Returns:
        uint8 [n, bytes] (:func:`record_bytes`): a header of 24 bytes, the weights, and each tensor
        of optimizer state. The header has the stored generation in its first 4 bytes, else zeros.

    Raises:
        RuntimeError: tensors do not fit each other, or a slot does not exist.
    """
    records: Tensor = torch.ops.dynemb.gather_records(
        rows.weights, rows.generations, rows.state, slab, slots
    )
    return records


@raises_typed_errors
def scatter_records_(rows: RowTensors, slab: int, slots: Tensor, records: Tensor) -> None:
    """Write rows into slots; the inverse of :func:`gather_records`.

    Args:
        rows: of the tables; weights, generations and state change.
        slab: its number.
        slots: int64 [n], from 0.
        records: uint8 [n, bytes]; the first 4 bytes of each are the generation to store.

    Raises:
        RuntimeError: tensors do not fit each other, or a slot does not exist; nothing has changed.
    """
    torch.ops.dynemb.scatter_records_(
        rows.weights, rows.generations, rows.state, slab, slots, records
    )


@register_fake("reserve_space_")
def _reserve_space_fake(
    tier_clock: Tensor,
    buckets: Tensor,
    tables: Tensor,
    meta: Tensor,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
) -> None:
    return None


@register_fake("bind_tiers")
def _bind_tiers_fake(
    buckets: Tensor,
    places: Sequence[Tensor],
    slots: Sequence[Tensor],
    free_slots: Sequence[Tensor],
    tier_clock: Tensor,
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    state: Sequence[Tensor],
    fraction: float,
    limits: Sequence[int],
    host_bytes: int,
) -> None:
    return None


@register_fake("end_epoch_")
def _end_epoch_fake(tier_clock: Tensor) -> None:
    return None


@register_fake("stage_")
def _stage_fake(
    places: Sequence[Tensor],
    slots: Sequence[Tensor],
    free_slots: Sequence[Tensor],
    tier_clock: Tensor,
    *staged_and_options: Any,
) -> Tensor:
    refuse_copies("stage_", places, slots, free_slots)
    return torch.empty_like(staged_and_options[_HANDLES])


@register_fake("staged_lookup_")
def _staged_lookup_fake(
    places: Sequence[Tensor],
    slots: Sequence[Tensor],
    free_slots: Sequence[Tensor],
    tier_clock: Tensor,
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    meta: Tensor,
    init_data: Tensor,
    ids: Tensor,
    handles: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    pooling: int,
) -> Tensor:
    refuse_copies("staged_lookup_", places, slots, free_slots)
    if pooling == Pooling.NONE:
        return ids.new_empty((ids.shape[0], feature_dims[0]), dtype=torch.float32)
    batch = (offsets.shape[0] - 1) // len(feature_tables)
    return ids.new_empty((batch, sum(feature_dims)), dtype=torch.float32)


@register_fake("prefetch_")
def _prefetch_fake(
    places: Sequence[Tensor],
    slots: Sequence[Tensor],
    free_slots: Sequence[Tensor],
    tier_clock: Tensor,
    *staged_and_options: Any,
) -> None:
    refuse_copies("prefetch_", places, slots, free_slots)


def _new_moves(handles: Tensor) -> Tensor:
    moves = torch.library.get_ctx().new_dynamic_size()
    return handles.new_empty((moves, MOVE_COLUMNS))


@register_fake("plan_moves_")
def _plan_moves_fake(
    places: Sequence[Tensor],
    slots: Sequence[Tensor],
    free_slots: Sequence[Tensor],
    tier_clock: Tensor,
    *staged_and_options: Any,
) -> tuple[Tensor, Tensor]:
    refuse_copies("plan_moves_", places, slots, free_slots)
    handles: Tensor = staged_and_options[_HANDLES]
    return torch.empty_like(handles), _new_moves(handles)


@register_fake("take_dirty_")
def _take_dirty_fake(
    places: Sequence[Tensor],
    slots: Sequence[Tensor],
    free_slots: Sequence[Tensor],
    tier_clock: Tensor,
    slab: int,
    begin: int,
    most: int,
) -> Tensor:
    refuse_copies("take_dirty_", slots)
    return _new_moves(tier_clock)


@register_fake("shrink_cache_")
def _shrink_cache_fake(
    places: Sequence[Tensor],
    slots: Sequence[Tensor],
    free_slots: Sequence[Tensor],
    tier_clock: Tensor,
    slab: int,
    limit: int,
) -> Tensor:
    refuse_copies("shrink_cache_", places, slots, free_slots)
    return _new_moves(tier_clock)


@register_fake("forget_rows_")
def _forget_rows_fake(
    places: Sequence[Tensor],
    slots: Sequence[Tensor],
    free_slots: Sequence[Tensor],
    tier_clock: Tensor,
    slab: int,
    handles: Tensor,
) -> None:
    refuse_copies("forget_rows_", places, slots, free_slots)


@register_fake("gather_records")
def _gather_records_fake(
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    state: Sequence[Tensor],
    slab: int,
    slots: Tensor,
) -> Tensor:
    tensors = [weights[slab], *state[slab :: len(weights)]]
    row = sum(t.element_size() * (t.shape[1] if t.dim() == 2 else 1) for t in tensors)
    return slots.new_empty((slots.shape[0], record_bytes(int(row))), dtype=torch.uint8)


@register_fake("scatter_records_")
def _scatter_records_fake(
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    state: Sequence[Tensor],
    slab: int,
    slots: Tensor,
    records: Tensor,
) -> None:
    refuse_copies("scatter_records_", weights, state)


always_saved("reserve_space_")
always_saved("stage_")
always_saved("staged_lookup_")
always_saved("plan_moves_")
