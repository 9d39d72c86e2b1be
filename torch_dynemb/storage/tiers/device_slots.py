"""Slots of a cache in GPU memory, changed outside of lookups by ops of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb.ops.columns import (
    DIRTY_MARK,
    GENERATION_BITS,
    GENERATION_MASK,
    Slot,
    Tier,
    TierHead,
)
from torch_dynemb.ops.tensors import RowTensors, TierTensors

_EPOCH_SHIFT = 32  # of the last use, in ``Slot.USE``


class DeviceSlots:
    """The slots of a cache, and their rows.

    Args:
        tensors: of the cache.
        rows: of the group; they have the slots.
    """

    def __init__(self, tensors: TierTensors, rows: RowTensors) -> None:
        self._tensors = tensors
        self._rows = rows

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self._tensors.clock.device

    def rows(self, slab: int) -> list[Tensor]:
        """Return weights and optimizer state; changes are unseen by autograd, as those of ops.

        Args:
            slab: a tiered one.
        """
        slabs = len(self._rows.weights)
        tensors = [self._rows.weights[slab], *self._rows.state[slab::slabs]]
        return [tensor.data for tensor in tensors]

    def find(self, slab: int, handles: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots of rows from 0 on, and whether they are of these handles.

        Args:
            slab: a tiered one.
            handles: int64 [n], of rows.
        """
        places = self._tensors.places[slab][handles >> GENERATION_BITS].long() - 1
        at = places.clamp(min=0)
        return at, (places >= 0) & (self._tensors.slots[slab][at, Slot.OWNER] == handles + 1)

    def make_stale(self, slab: int, handles: Tensor) -> None:
        """Make gradients of slots stale, as after a change of the row's owner.

        Args:
            slab, handles: as for :meth:`find`.
        """
        places = self._tensors.places[slab][handles >> GENERATION_BITS].long() - 1
        at, slots = places[places >= 0], self._tensors.slots[slab]
        marks = slots[at, Slot.MARKS]
        following = ((marks & GENERATION_MASK) % GENERATION_MASK) + 1  # 0 means: no row
        slots[at, Slot.MARKS] = (marks & ~GENERATION_MASK) | following
        self._rows.generations[slab][at] = following.to(torch.int32)

    def forget(self, slab: int, handles: Tensor) -> None:
        """Take rows out of their slots without saving them.

        Args:
            slab, handles: as for :meth:`find`; a row may occur several times.
        """
        places = self._tensors.places[slab][handles >> GENERATION_BITS].long() - 1
        self.clear(slab, places[places >= 0].unique())

    def clear(self, slab: int, at: Tensor) -> None:
        """Take the rows out of slots without saving them.

        Args:
            slab: a tiered one.
            at: int64 [n], different slots with rows.
        """
        if at.numel() == 0:
            return
        slots, clock = self._tensors.slots[slab], self._tensors.clock[1 + slab]
        rows = (slots[at, Slot.OWNER] - 1) >> GENERATION_BITS
        self._tensors.places[slab][rows] = 0
        slots[at, Slot.OWNER] = 0
        slots[at, Slot.ID] = 0
        slots[at, Slot.MARKS] &= GENERATION_MASK
        free = int(clock[Tier.FREE_COUNT])
        self._tensors.free_slots[slab][free : free + len(at)] = at.to(torch.int32)
        clock[Tier.FREE_COUNT] += len(at)

    def drop(self, slab: int, handles: Tensor) -> None:
        """Forget rows without an owner.

        Those in lookups of this step keep their slots until it ends.

        Args:
            slab: a tiered one.
            handles: int64 [n], of the rows while they had an owner.
        """
        slots = self._tensors.slots[slab]
        at = self._tensors.places[slab][handles >> GENERATION_BITS].long() - 1
        last = slots[at.clamp(min=0), Slot.USE] >> _EPOCH_SHIFT
        epoch = self._tensors.clock[0, TierHead.EPOCH]
        in_use = (at >= 0) & ((last - epoch).to(torch.int32) >= 0)
        slots[at[in_use], Slot.MARKS] &= ~DIRTY_MARK
        self.forget(slab, handles[~in_use])


__all__ = ["DeviceSlots"]
