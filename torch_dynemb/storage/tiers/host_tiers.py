"""Tiers of a GPU: a cache of rows in its own memory (HBM), and all rows in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import (
    DIRTY_MARK,
    GENERATION_BITS,
    GENERATION_MASK,
    Slab,
    Slot,
    Tier,
    TierHead,
)
from torch_dynemb.ops.tensors import IndexTensors, RowTensors, TierTensors
from torch_dynemb.storage.tiers.copied_rows import CopiedRows, CopiedSlab
from torch_dynemb.storage.tiers.device_slots import DeviceSlots
from torch_dynemb.storage.tiers.host_store import HostStore
from torch_dynemb.storage.tiers.row_records import packed_rows, unpack_rows
from torch_dynemb.storage.tiers.stats import StorageStats, cache_counts
from torch_dynemb.storage.tiers.tiers import Records, Tiers

_ALL_READERS = 255  # dirty bits


class HostTiers(Tiers):
    """A cache in HBM, above a home in host memory for every row.

    Row tensors have the slots of the cache first, then the homes. Rows without a slot are read and
    written at their home.

    Args:
        storage: with a cache.
        tensors: of the cache, empty; ``slots`` has rows for tiered slabs.
        index, rows: of the group.
        cached: numbers of the tiered slabs.

    Raises:
        RuntimeError: HBM or host memory is short.
    """

    pins = True
    records_changes = True
    prefetches_beside = True

    def __init__(
        self,
        storage: HostStore,
        tensors: TierTensors,
        index: IndexTensors,
        rows: RowTensors,
        cached: Sequence[int],
    ) -> None:
        super().__init__(tensors, cached)
        self._index, self._rows = index, rows
        self._slots = DeviceSlots(tensors, rows)
        self._steps = 0
        size = storage.cache_size
        fraction = size.value if size is not None and size.unit == "fraction" else 0.0
        ops.bind_tiers(index, tensors, rows, fraction=fraction, host_bytes=storage.host_bytes)

    # -- lookups -------------------------------------------------------------------------------

    def reserve_space(self, index: IndexTensors, batch: ops.LookupBatch) -> None:
        pass  # homes get memory with their ids

    def stage(self, staged: ops.StagedIds, *, trains: bool) -> Tensor:
        return ops.stage_(self.tensors, staged, trains=trains)

    def lookup(self, batch: ops.LookupBatch, handles: Tensor) -> Tensor:
        return ops.staged_lookup_(self.tensors, self._rows, batch, handles)

    def prefetch(self, staged: ops.StagedIds, *, ahead: int) -> None:
        ops.prefetch_(self.tensors, staged, ahead=ahead)

    # -- rows without a lookup -----------------------------------------------------------------

    def read(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records:
        numbers, found = self._locate(slab, handles)
        return Records(packed_rows(self._tensors(slab), numbers), found)

    def _locate(self, slab: int, handles: Tensor) -> tuple[Tensor, Tensor]:
        """Return where rows are in the tensors, int64 [n], and whether they have been written."""
        slots = self.tensors.slots[slab]
        places, at = self._places(slab, handles)
        own = (places >= 0) & (slots[at, Slot.OWNER] == handles + 1)
        numbers = torch.where(own, at, self._homes(slab, handles))
        live = torch.where(own, slots[at, Slot.MARKS], handles) & GENERATION_MASK
        stored = self._rows.generations[slab][numbers]
        # where a slot still has an earlier owner, the row has not been written
        return numbers, (own | (places < 0)) & (stored == live)

    def write(self, slab: int, table: int, ids: Tensor, handles: Tensor, records: Tensor) -> None:
        slots = self.tensors.slots[slab]
        places, at = self._places(slab, handles)
        own = (places >= 0) & (slots[at, Slot.OWNER] == handles + 1)
        self._forget(slab, places[(places >= 0) & ~own].unique())
        numbers = torch.where(own, at, self._homes(slab, handles))
        unpack_rows(self._tensors(slab), numbers, records)
        live = torch.where(own, slots[at, Slot.MARKS], handles) & GENERATION_MASK
        self._rows.generations[slab].index_copy_(0, numbers, live.to(torch.int32))
        slots[places[own], Slot.MARKS] |= DIRTY_MARK
        for dirty in self._rows.dirty_bits[slab : slab + 1]:
            dirty[numbers] = _ALL_READERS

    def erase(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> None:
        pass  # the next owner of a row has a newer handle, for which it is unwritten

    def rows_of(self, slab: int, numbers: Tensor) -> Tensor:
        slots = self.tensors.slots[slab]
        at = numbers.clamp(max=len(slots) - 1)
        owners = (slots[at, Slot.OWNER] - 1) >> GENERATION_BITS
        return torch.where(numbers < len(slots), owners, numbers - len(slots))

    def _tensors(self, slab: int) -> list[Tensor]:
        """Return the tensors with slots and homes: weights, then optimizer state."""
        return [self._rows.weights[slab], *self._rows.state[slab :: len(self._rows.weights)]]

    def _places(self, slab: int, handles: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots of rows, negative for rows without one, and the same from 0 on."""
        places = self.tensors.places[slab][handles >> GENERATION_BITS].long() - 1
        return places, places.clamp(min=0)

    def _homes(self, slab: int, handles: Tensor) -> Tensor:
        return (handles >> GENERATION_BITS) + len(self.tensors.slots[slab])

    def _forget(self, slab: int, at: Tensor) -> None:
        """Take rows out of slots without a copy to their homes, which count as unwritten."""
        owners = self.tensors.slots[slab][at, Slot.OWNER] - 1
        self._rows.generations[slab][self._homes(slab, owners)] = 0
        self._slots.clear(slab, at)

    # -- changes -------------------------------------------------------------------------------

    def pin(self) -> CopiedRows:
        copies = {slab: self._copy(slab) for slab in self.cached}
        return CopiedRows(copies)

    def copied_bytes(self, slab: int) -> int:
        tensors = (*self._tensors(slab), self._rows.generations[slab])
        row_bytes = sum(tensor[:1].numel() * tensor.element_size() for tensor in tensors)
        return row_bytes * int(self._index.slabs[slab, Slab.NEXT_ROW])

    def _copy(self, slab: int) -> CopiedSlab:
        slots = self.tensors.slots[slab][: self.used_slots(slab)]
        at = (slots[:, Slot.OWNER] > 0).nonzero()[:, 0]
        owners, marks = slots[at, Slot.OWNER] - 1, slots[at, Slot.MARKS] & GENERATION_MASK
        written = self._rows.generations[slab][at] == marks
        of_slots = torch.where(written, owners & GENERATION_MASK, 0).to(torch.int32)
        used, rows = int(self._index.slabs[slab, Slab.NEXT_ROW]), owners >> GENERATION_BITS
        begin = len(self.tensors.slots[slab])
        tensors = list(self._tensors(slab))
        return CopiedSlab.of(tensors, self._rows.generations[slab], range(begin, begin + used)).put(
            rows, [tensor[at] for tensor in tensors], of_slots
        )

    def dirty_bits(self, slab: int, handles: Tensor) -> Tensor:
        dirty = self._rows.dirty_bits[slab]
        numbers, written = self._locate(slab, handles)
        bits = dirty[numbers] | dirty[self._homes(slab, handles)]
        return torch.where(written, bits, _ALL_READERS)

    def set_dirty_bits(self, slab: int, used_rows: int, *, kept: int, added: int) -> None:
        begin = len(self.tensors.slots[slab])
        dirty = self._rows.dirty_bits[slab]
        for part in (dirty[: self.used_slots(slab)], dirty[begin : begin + used_rows]):
            part.bitwise_and_(kept).bitwise_or_(added)

    # -- steps ---------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._steps

    def end_step(self, index: IndexTensors) -> None:
        self._steps += 1
        ops.end_epoch_(self.tensors)

    def check(self) -> None:
        pass  # nothing is read or written behind a call

    # -- memory --------------------------------------------------------------------------------

    def used_slots(self, slab: int) -> int:
        return int(self.tensors.clock[1 + slab, Tier.USED])

    def rows_in_memory(self, slab: int, used_rows: int) -> int:
        return self.used_slots(slab) + used_rows

    def kept_rows(self, slab: int, used_rows: int) -> int:
        owners = self.tensors.slots[slab][: self.used_slots(slab), Slot.OWNER]
        rows = (owners - 1) >> GENERATION_BITS
        self._forget(slab, ((owners > 0) & (rows >= used_rows)).nonzero()[:, 0])
        return used_rows

    def stats(self) -> StorageStats:
        head, *clocks = self.tensors.clock.tolist()
        return StorageStats(
            **cache_counts(lambda column: sum(clocks[slab][column] for slab in self.cached)),
            in_place=head[TierHead.IN_PLACE],
            reads=head[TierHead.LOADED],
            bytes_read=head[TierHead.LOADED_BYTES],
            bytes_written=head[TierHead.WRITTEN_BYTES],
        )


__all__ = ["HostTiers"]
