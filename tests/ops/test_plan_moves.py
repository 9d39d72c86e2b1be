"""The plan of a cache against one in plain Python: dicts, epochs, counts, and sorted victims."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dynemb import ops
from torch_dynemb.ops.columns import (
    GENERATION_BITS,
    META_COLUMNS,
    SLOT_COLUMNS,
    TIER_COLUMNS,
    Move,
    Slot,
    Tier,
    TierHead,
)
from torch_dynemb.ops.tensors import TierTensors

pytestmark = pytest.mark.cpu_only("caches of rows are of the CPU")

ROWS, LIMIT = 40, 8
WORTH_COUNTS = 64
HALVE_AFTER = 8  # uses for each slot


@dataclass
class Cached:
    """A row in a slot."""

    handle: int
    epoch: int
    count: int
    dirty: bool


@dataclass
class Oracle:
    """A cache of LIMIT slots.

    Attributes:
        slots: by number.
        generations: of slots.
        free: slots that are free, the next one last.
    """

    epoch: int = 1
    training: bool = False
    touches: int = 0
    used: int = 0
    slots: dict[int, Cached] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)

    def slot_of(self, handle: int) -> int | None:
        return next((s for s, row in self.slots.items() if row.handle == handle), None)

    def call(
        self, handles: list[int], *, trains: bool, ahead: int
    ) -> tuple[list[int], list[tuple[int, int, int, int]]]:
        """Slots of the rows; and what moves: loads, slot, handle, generation."""
        if ahead == 0:
            self.training |= trains
            self.epoch += not self.training
        until, counts = self.epoch + ahead, trains or ahead > 0
        missing = []
        for handle in dict.fromkeys(handles):
            slot = self.slot_of(handle)
            if slot is None:
                missing.append(handle)
                continue
            row = self.slots[slot]
            row.dirty |= trains
            if row.epoch < until:
                row.epoch, row.count = until, row.count + counts
                self.touches += 1
        moves = self.evict(len(missing)) if missing else []
        for handle in missing:
            slot = self.free.pop() if self.free else self.used
            self.used = max(self.used, slot + 1)
            self.generations[slot] = self.generations.get(slot, 0) + 1
            self.slots[slot] = Cached(handle, until, int(counts), trains)
            self.touches += 1
            moves.append((1, slot, handle, self.generations[slot]))
        given = [self.slot_of(handle) for handle in handles]
        return [s << GENERATION_BITS | self.generations[s] for s in given if s is not None], moves

    def evict(self, wanted: int) -> list[tuple[int, int, int, int]]:
        lacking = wanted - len(self.free) - max(LIMIT - self.used, 0)
        if lacking <= 0:
            return []
        if self.touches >= HALVE_AFTER * LIMIT:
            self.touches = 0
            for row in self.slots.values():
                row.count //= 2
        may_go = [s for s, row in self.slots.items() if row.epoch < self.epoch]
        victims = sorted(may_go, key=lambda s: (self.worth(self.slots[s]), s))[:lacking]
        moves = []
        for slot in sorted(victims):
            row = self.slots.pop(slot)
            if row.dirty:
                moves.append((0, slot, row.handle, self.generations[slot]))
            self.free.append(slot)
        return moves

    def worth(self, row: Cached) -> tuple[int, int]:
        """Counts first, then the age, in steps of a half of its power of two."""
        age = self.epoch - row.epoch
        log = age.bit_length() - 1
        half = (age >> (log - 1)) & 1 if log > 0 else 0
        return min(row.count, WORTH_COUNTS - 1), -(2 * log + half)


def empty_cache() -> tuple[TierTensors, torch.Tensor]:
    clock = torch.zeros(2, TIER_COLUMNS, dtype=torch.int64)
    clock[0, TierHead.EPOCH], clock[1, Tier.LIMIT] = 1, LIMIT
    slots = torch.zeros(ROWS, SLOT_COLUMNS, dtype=torch.int64)
    tiers = TierTensors([torch.zeros(ROWS, dtype=torch.int32)], [slots], clock)
    return tiers, torch.zeros(1, META_COLUMNS, dtype=torch.int64)


CALLS = st.one_of(
    st.tuples(st.just("train"), st.lists(st.integers(0, ROWS - 1), max_size=10)),
    st.tuples(st.just("read"), st.lists(st.integers(0, ROWS - 1), max_size=10)),
    st.tuples(st.just("prefetch"), st.lists(st.integers(0, ROWS - 1), max_size=10)),
    st.tuples(st.just("step"), st.just([])),
    st.tuples(st.just("step"), st.just([])),
)


@given(st.lists(CALLS, min_size=5, max_size=40))
@settings(max_examples=60, deadline=None)
def test_plans_are_those_of_the_oracle(calls: list[tuple[str, list[int]]]) -> None:
    tiers, meta = empty_cache()
    oracle = Oracle()
    for kind, rows in calls:
        if kind == "step":
            tiers.clock[0, TierHead.EPOCH] += 1
            tiers.clock[0, TierHead.TRAINING] = 0
            oracle.epoch, oracle.training = oracle.epoch + 1, False
            continue
        handles = [row << GENERATION_BITS | 1 for row in rows]
        trains, ahead = kind == "train", 2 * (kind == "prefetch")
        staged = ops.StagedIds(
            meta,
            torch.tensor(rows, dtype=torch.int64) + 1000,
            torch.tensor(handles, dtype=torch.int64),
            torch.tensor([0, len(rows)]),
            [0],
        )
        planned = ops.plan_moves_(tiers, staged, trains=trains, ahead=ahead)
        slots, moves = oracle.call(handles, trains=trains, ahead=ahead)
        assert planned.handles.tolist() == slots
        columns = [Move.LOADS, Move.SLOT, Move.HANDLE, Move.GENERATION]
        assert [tuple(move) for move in planned.moves[:, columns].tolist()] == moves
        expected = [oracle.slot_of(row << GENERATION_BITS | 1) for row in range(ROWS)]
        assert tiers.places[0].tolist() == [0 if s is None else s + 1 for s in expected]
        for slot, row in oracle.slots.items():
            words = tiers.slots[0][slot].tolist()
            assert words[Slot.OWNER] == row.handle + 1
            assert words[Slot.ID] == (row.handle >> GENERATION_BITS) + 1000
            assert words[Slot.USE] == row.epoch << 32 | row.count
