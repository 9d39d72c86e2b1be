"""Ops on the caches of a GPU's tables with rows in a store: in its own memory and the host's.

The cache in GPU memory has slots alone. :func:`take_slots_` decides which rows move; the caller
moves them as records through the cache in host memory, :func:`stage_records_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.columns import MOVE_COLUMNS
from torch_dynemb.ops.functional_copies import refuse_copies
from torch_dynemb.ops.recomputation import always_saved
from torch_dynemb.ops.tensors import TierTensors
from torch_dynemb.ops.tiers import StagedIds


class TakenSlots(NamedTuple):
    """Result of :func:`take_slots_`.

    Attributes:
        handles: int64 [N], of slots; negative ones are those of the argument.
        moves: int64 [moves, 7] (``columns.Move``) in host memory: first the changed rows that lost
            their slots, then the rows that got one.
        missing: int64 [slabs] in host memory: 0, or the slots that the call needs, for which GPU
            memory is too short. Its rows in such a slab got no slots.
    """

    handles: Tensor
    moves: Tensor
    missing: Tensor


@raises_typed_errors
def take_slots_(
    tiers: TierTensors, staged: StagedIds, *, trains: bool, ahead: int = 0
) -> TakenSlots:
    """Give the rows of a lookup slots of a GPU's cache above a store; waits for the GPU once.

    The cache grows if the rows need more slots than it has. The caller saves and loads rows before
    they are read or changed.

    Args:
        tiers: of the tables, bound by :func:`bind_tiers` without homes; all tensors change.
        staged: the ids, with the handles of their rows.
        trains: whether the rows will be changed; they then keep their slots until the step ends.
        ahead: 0: for a lookup now. Otherwise how many steps until the lookup: rows beyond the size
            of the cache get no slots.

    Raises:
        RuntimeError: tensors do not fit each other, have homes, or are copies; or the stream is
            being captured. Nothing has changed.
    """
    return TakenSlots(
        *torch.ops.dynemb.take_slots_(
            *tiers, *staged[:-1], list(staged.feature_tables), trains, ahead
        )
    )


@raises_typed_errors
def release_slots(tiers: TierTensors, slab: int, slots: int) -> None:
    """Give back GPU memory of slots without rows; waits for the GPU.

    Args:
        tiers: as for :func:`take_slots_`; nothing changes.
        slab: number of one with a cache.
        slots: number of slots that keep their memory.

    Raises:
        RuntimeError: an argument is out of range, or the clock is a copy.
    """
    torch.ops.dynemb.release_slots(tiers.clock, slab, slots)


@raises_typed_errors
def reserve_saves_(tier_clock: Tensor, rows: Sequence[int]) -> None:
    """Reserve disk space for the changed rows that other rows push out of a cache.

    The next call that moves rows uses the space.

    Args:
        tier_clock: int64 [1 + slabs, columns], of a store (:func:`store_open`).
        rows: for each slab, the most rows that will come into the cache.

    Raises:
        RuntimeError: the disk is full or has failed; or no store, or a wrong number of slabs.
            Nothing has changed.
    """
    torch.ops.dynemb.reserve_saves_(tier_clock, list(rows))


@raises_typed_errors
def stage_records_(tiers: TierTensors, staged: StagedIds, overwritten: Tensor) -> Tensor:
    """Give rows slots in a cache above an open store, for copies before the next call.

    Args:
        tiers: of the cache; all tensors change.
        staged: the rows.
        overwritten: bool [N], rows that the caller writes: they are not loaded. The caller sets
            their dirty bits.

    Returns:
        int64 [N], handles of slots; see :func:`stage_`.

    Raises:
        RuntimeError: as :func:`stage_`.
    """
    slots: Tensor = torch.ops.dynemb.stage_records_(
        *tiers, *staged[:-1], list(staged.feature_tables), overwritten
    )
    return slots


@register_fake("take_slots_")
def _take_slots_fake(
    places: Sequence[Tensor],
    slots: Sequence[Tensor],
    free_slots: Sequence[Tensor],
    tier_clock: Tensor,
    meta: Tensor,
    ids: Tensor,
    handles: Tensor,
    *more: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_copies("take_slots_", places, slots, free_slots)
    host = torch.device("cpu")
    moves = torch.library.get_ctx().new_dynamic_size()
    return (
        torch.empty_like(handles),
        handles.new_empty((moves, MOVE_COLUMNS), device=host),
        handles.new_empty((len(places),), device=host),
    )


@register_fake("release_slots")
def _release_slots_fake(tier_clock: Tensor, slab: int, slots: int) -> None:
    return None


@register_fake("reserve_saves_")
def _reserve_saves_fake(tier_clock: Tensor, rows: Sequence[int]) -> None:
    return None


@register_fake("stage_records_")
def _stage_records_fake(
    places: Sequence[Tensor],
    slots: Sequence[Tensor],
    free_slots: Sequence[Tensor],
    tier_clock: Tensor,
    meta: Tensor,
    ids: Tensor,
    handles: Tensor,
    *more: Any,
) -> Tensor:
    refuse_copies("stage_records_", places, slots, free_slots)
    return torch.empty_like(handles)


always_saved("take_slots_")
always_saved("stage_records_")
