"""A cache of rows in HBM with homes in host memory, in plain Python: which row has which slot.

It plans one call at a time, in the order of ids, where kernels work in parallel.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_dynemb.ops.columns import (
    GENERATION_BITS,
    GENERATION_MASK,
    PADDING_HANDLE,
    TIER_COLUMNS,
    Slot,
    Tier,
    TierHead,
)

COUNTS, AGES = 64, 64  # of uses and of their ages that worth distinguishes
SLOTS_PER_VICTIM = 64
USES_BEFORE_HALVING = 8
IN_PLACE = -3
IN_PLACE_EPOCHS = 1 << 20
TABLE_SHIFT = GENERATION_BITS + 1 + 19


def next_generation(generation: int) -> int:
    return generation % GENERATION_MASK + 1


@dataclass
class ModelSlot:
    """The row in a slot, and how it was used.

    Attributes:
        owner: handle of the row; -1: none.
        id, table: of the row.
        epoch, count: of its last use, and of its uses.
        dirty: whether it may differ from its home.
        generation: of the slot's own handle.
    """

    owner: int = -1
    id: int = 0
    table: int = 0
    epoch: int = 0
    count: int = 0
    dirty: bool = False
    generation: int = 0

    def worth(self, now: int) -> int:
        age = now - self.epoch
        log = age.bit_length() - 1
        age_class = 0 if age <= 1 else 2 * log + (age >> (log - 1) & 1)
        return min(self.count, COUNTS - 1) * AGES + AGES - 1 - age_class

    def words(self) -> list[int]:
        marks = self.table << TABLE_SHIFT | self.dirty << GENERATION_BITS | self.generation
        return [self.owner + 1, self.id, self.epoch << 32 | self.count, marks]


@dataclass
class CacheModel:
    """Places of rows and their slots.

    Args:
        most: slots that there may be.
        rows: that there may be.
        limit: slots of the cache.
    """

    most: int
    rows: int
    limit: int
    epoch: int = 1
    training: bool = False
    served_at_home: int = 0
    slots: list[ModelSlot] = field(default_factory=list)
    clock: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))

    def __post_init__(self) -> None:
        self.places = [0] * self.rows

    def in_place(self) -> int:
        return IN_PLACE - self.epoch % IN_PLACE_EPOCHS

    def end_epoch(self) -> None:
        self.epoch += 1
        self.training = False
        self.clock[Tier.MOST_USED] = len(self.slots)

    def stage(
        self, table: int, ids: list[int], handles: list[int], *, trains: bool, ahead: int = 0
    ) -> list[int]:
        """Plan a call of one table; return the handles of :func:`torch_dynemb.ops.stage_`."""
        if ahead == 0:
            self.epoch += not trains and not self.training
            self.training |= trains
        epoch, counts = self.epoch + ahead, int(trains or ahead > 0)
        loaded = Tier.PREFETCHED if ahead else Tier.MISSES
        missing: dict[int, int] = {}  # first positions by row
        replaced: dict[int, int] = {}  # the same, of rows that have another owner since
        results: dict[int, int] = {}  # of rows with a slot
        for i, handle in enumerate(handles):
            row = handle >> GENERATION_BITS
            place = self.places[row] if handle >= 0 else self.in_place()
            if place == self.in_place() or row in missing:
                continue
            if place <= 0:
                missing[row] = i
                continue
            slot = self.slots[place - 1]
            if slot.owner < handle:
                replaced.setdefault(row, i)
                continue
            results[i] = self.result(i, handle, set(), ahead)
            if slot.owner == handle:
                slot.dirty |= trains
                if slot.epoch < epoch:
                    slot.epoch, slot.count = epoch, slot.count + counts
                    self.clock[Tier.TOUCHES] += 1
        given = self.find_slots(len(missing), {self.places[row] - 1 for row in replaced})
        self.clock[loaded] += len(given) + len(replaced)
        self.clock[Tier.TOUCHES] += len(given) + len(replaced)
        settled = set(replaced.values())
        for row, i in replaced.items():
            slot = self.slots[self.places[row] - 1]
            self.put(slot, table, ids[i], handles[i], epoch, counts, trains)
        for rank, (row, i) in enumerate(missing.items()):
            if rank >= len(given):
                self.places[row] = 0 if ahead else self.in_place()
                continue
            slot = self.slots[given[rank]]
            if slot.owner >= 0:
                self.places[slot.owner >> GENERATION_BITS] = 0
            self.put(slot, table, ids[i], handles[i], epoch, counts, trains)
            self.places[row] = given[rank] + 1
            settled.add(i)
        if len(missing) > 0:
            self.clock[Tier.MOST_USED] = max(self.clock[Tier.MOST_USED], len(self.slots))
        for i, handle in enumerate(handles):
            if i not in results:
                results[i] = self.result(i, handle, settled, ahead)
        return [results[i] for i in range(len(handles))]

    def put(
        self,
        slot: ModelSlot,
        table: int,
        id: int,
        handle: int,
        epoch: int,
        counts: int,
        trains: bool,
    ) -> None:
        slot.owner, slot.id, slot.table = handle, id, table
        slot.epoch, slot.count, slot.dirty = epoch, counts, trains
        slot.generation = next_generation(slot.generation)

    def result(self, i: int, handle: int, settled: set[int], ahead: int) -> int:
        if handle < 0:
            return handle
        row = handle >> GENERATION_BITS
        place = self.places[row]
        if place <= 0:
            self.served_at_home += not ahead
            return self.most + row << GENERATION_BITS | handle & GENERATION_MASK
        slot = self.slots[place - 1]
        if slot.owner != handle:
            self.clock[Tier.STALE] += 1
            return PADDING_HANDLE
        self.clock[Tier.HITS] += not ahead and i not in settled
        return place - 1 << GENERATION_BITS | slot.generation

    def find_slots(self, wanted: int, kept: set[int]) -> list[int]:
        """Untouched slots, then those of victims, which are none of ``kept``."""
        clock = self.clock
        untouched = min(wanted, self.limit - len(self.slots))
        slots = list(range(len(self.slots), len(self.slots) + untouched))
        victims = self.find_victims(wanted - untouched, kept) if wanted > untouched else []
        self.slots += [ModelSlot() for _ in range(untouched)]
        clock[Tier.EVICTED] += len(victims)
        return slots + victims

    def find_victims(self, wanted: int, kept: set[int]) -> list[int]:
        clock, used = self.clock, len(self.slots)
        may_go = [
            slot.owner >= 0 and slot.epoch < self.epoch and at not in kept
            for at, slot in enumerate(self.slots)
        ]
        if clock[Tier.PORTION] < wanted:
            if clock[Tier.TOUCHES] >= USES_BEFORE_HALVING * self.limit:
                clock[Tier.TOUCHES] = 0
                for slot in self.slots:
                    slot.count //= 2
            portion = max(wanted, self.limit // SLOTS_PER_VICTIM)
            eligible = itertools.compress(self.slots, may_go)
            worths = sorted(slot.worth(self.epoch) for slot in eligible)[:portion]
            every = len(worths) < portion
            clock[Tier.WORTH] = COUNTS * AGES - 1 if every else worths[-1]
            clock[Tier.TIES] = worths.count(clock[Tier.WORTH])
            clock[Tier.PORTION] = len(worths)
        begin = clock[Tier.CURSOR] if clock[Tier.CURSOR] < used else 0
        victims: list[int] = []
        for steps in range(used):
            at = (begin + steps) % used
            worth = self.slots[at].worth(self.epoch)
            tie = worth == clock[Tier.WORTH] and clock[Tier.TIES] > 0
            if not may_go[at] or not (worth < clock[Tier.WORTH] or tie):
                continue
            clock[Tier.TIES] -= tie
            victims.append(at)
            clock[Tier.CURSOR] = at + 1
            if len(victims) == wanted:
                clock[Tier.PORTION] -= wanted
                return victims
        clock[Tier.PORTION], clock[Tier.CURSOR] = 0, begin
        return victims

    # -- as tensors ----------------------------------------------------------------------------

    def words_of_slots(self) -> Tensor:
        words = [slot.words() for slot in self.slots]
        words += [[0] * len(Slot)] * (self.most - len(words))
        return torch.tensor(words)

    def words_of_clock(self) -> Tensor:
        """Without what moves of rows count."""
        words = torch.zeros(2, TIER_COLUMNS, dtype=torch.int64)
        words[0, TierHead.EPOCH], words[0, TierHead.TRAINING] = self.epoch, self.training
        words[0, TierHead.IN_PLACE] = self.served_at_home
        for column, value in self.clock.items():
            words[1, column] = value
        words[1, Tier.LIMIT], words[1, Tier.USED] = self.limit, len(self.slots)
        return words
