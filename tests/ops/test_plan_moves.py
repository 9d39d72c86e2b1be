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

WORTH_COUNTS = 64
HALVE_AFTER = 8  # uses for each slot
SLOTS_PER_VICTIM = 64


@dataclass
class Cached:
    """A row in a slot."""

    handle: int
    epoch: int
    count: int
    dirty: bool


@dataclass
class Oracle:
    """A cache.

    Attributes:
        limit: slots that it is to have at most.
        slots: by number.
        generations: of slots.
        free: slots that are free, the next one last.
        cursor: slot at which the search for victims goes on.
    """

    limit: int
    epoch: int = 1
    training: bool = False
    touches: int = 0
    used: int = 0
    slots: dict[int, Cached] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    cursor: int = 0

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
        slots, moves = self.take(len(missing))
        for slot, handle in zip(slots, missing, strict=True):
            self.generations[slot] = self.generations.get(slot, 0) + 1
            self.slots[slot] = Cached(handle, until, int(counts), trains)
            self.touches += 1
            moves.append((1, slot, handle, self.generations[slot]))
        given = [self.slot_of(handle) for handle in handles]
        return [s << GENERATION_BITS | self.generations[s] for s in given if s is not None], moves

    def take(self, wanted: int) -> tuple[list[int], list[tuple[int, int, int, int]]]:
        """Slots for missing rows; and what moves out of them."""
        slots = [self.free.pop() for _ in range(min(wanted, len(self.free)))]
        slots += self.untouched(min(wanted - len(slots), max(self.limit - self.used, 0)))
        lacking = wanted - len(slots)
        if lacking == 0:
            return slots, []
        victims = self.victims(max(lacking, self.limit // SLOTS_PER_VICTIM))
        moves = []
        for slot in victims:
            row = self.slots.pop(slot)
            self.cursor = slot + 1
            if row.dirty:
                moves.append((0, slot, row.handle, self.generations[slot]))
        self.free = victims[lacking:][::-1]
        slots += victims[:lacking]
        return slots + self.untouched(wanted - len(slots)), moves

    def untouched(self, count: int) -> list[int]:
        self.used += count
        return list(range(self.used - count, self.used))

    def victims(self, count: int) -> list[int]:
        """The rows of least worth; among equals, the first from the cursor on."""
        if self.touches >= HALVE_AFTER * self.limit:
            self.touches = 0
            for row in self.slots.values():
                row.count //= 2
        end = self.used
        begin = self.cursor if self.cursor < end else 0
        in_order = [*range(begin, end), *range(begin)]
        may_go = [s for s in in_order if s in self.slots and self.slots[s].epoch < self.epoch]
        goes = sorted(may_go, key=lambda s: self.worth(self.slots[s]))[:count]
        return [s for s in may_go if s in goes]

    def worth(self, row: Cached) -> tuple[int, int]:
        """Counts first, then the age, in steps of a half of its power of two."""
        age = self.epoch - row.epoch
        log = age.bit_length() - 1
        half = (age >> (log - 1)) & 1 if log > 0 else 0
        return min(row.count, WORTH_COUNTS - 1), -(2 * log + half)


def empty_cache(rows: int, limit: int) -> tuple[TierTensors, torch.Tensor]:
    clock = torch.zeros(2, TIER_COLUMNS, dtype=torch.int64)
    clock[0, TierHead.EPOCH], clock[1, Tier.LIMIT] = 1, limit
    places, free_slots = (torch.zeros(rows, dtype=torch.int32) for _ in range(2))
    slots = torch.zeros(rows, SLOT_COLUMNS, dtype=torch.int64)
    tiers = TierTensors([places], [slots], [free_slots], clock)
    return tiers, torch.zeros(1, META_COLUMNS, dtype=torch.int64)


def calls(rows: st.SearchStrategy[list[int]]) -> st.SearchStrategy[list[tuple[str, list[int]]]]:
    kinds = [st.tuples(st.just(kind), rows) for kind in ("train", "read", "prefetch")]
    step = st.tuples(st.just("step"), st.just([]))
    return st.lists(st.one_of(*kinds, step, step), min_size=5, max_size=40)


def strided(first: int, count: int, stride: int) -> list[int]:
    """Return rows of a table with MANY_ROWS."""
    return [(first + stride * i) % MANY_ROWS for i in range(count)]


ROWS, MANY_ROWS = 40, 500
FEW = calls(st.lists(st.integers(0, ROWS - 1), max_size=10))
MANY = calls(
    st.builds(strided, st.integers(0, MANY_ROWS), st.integers(0, 60), st.sampled_from([1, 7]))
)


@given(FEW)
@settings(max_examples=60, deadline=None)
def test_plans_are_those_of_the_oracle(calls: list[tuple[str, list[int]]]) -> None:
    check_plans(calls, ROWS, limit=8)


@pytest.mark.long
@given(MANY)
@settings(max_examples=40, deadline=None)
def test_victims_that_no_row_needs_are_free(calls: list[tuple[str, list[int]]]) -> None:
    # a search takes three victims at least
    filled = [("train", strided(100 * i, 100, 1)) for i in range(2)]
    check_plans([*filled, ("step", []), *calls, ("step", []), ("train", [499])], MANY_ROWS, 192)


def check_plans(calls: list[tuple[str, list[int]]], row_count: int, limit: int) -> None:
    tiers, meta = empty_cache(row_count, limit)
    oracle = Oracle(limit)
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
        expected = [oracle.slot_of(row << GENERATION_BITS | 1) for row in range(row_count)]
        assert tiers.places[0].tolist() == [0 if s is None else s + 1 for s in expected]
        for slot, row in oracle.slots.items():
            words = tiers.slots[0][slot].tolist()
            assert words[Slot.OWNER] == row.handle + 1
            assert words[Slot.ID] == (row.handle >> GENERATION_BITS) + 1000
            assert words[Slot.USE] == row.epoch << 32 | row.count
        count = len(oracle.free)
        assert tiers.free_slots[0][:count].tolist() == oracle.free
        columns = [Tier.USED, Tier.FREE_COUNT, Tier.CURSOR, Tier.TOUCHES]
        expected = [oracle.used, count, oracle.cursor, oracle.touches]
        assert tiers.clock[1, columns].tolist() == expected


def one_free_slot() -> tuple[TierTensors, torch.Tensor]:
    """Eight slots are used; slot 3 is free."""
    tiers, meta = empty_cache(ROWS, limit=8)
    rows = torch.arange(8)
    handles, offsets = rows << GENERATION_BITS | 1, torch.tensor([0, 8])
    ops.plan_moves_(tiers, ops.StagedIds(meta, rows, handles, offsets, [0]), trains=False)
    ops.forget_rows_(tiers, 0, handles[3:4])
    return tiers, meta


@pytest.mark.parametrize("slot", [-1, 2, 8])
def test_a_damaged_stack_is_refused(slot: int) -> None:
    tiers, meta = one_free_slot()
    assert tiers.free_slots[0][0] == 3
    tiers.free_slots[0][0] = slot
    places, slots = tiers.places[0].clone(), tiers.slots[0].clone()
    handles = torch.tensor([20 << GENERATION_BITS | 1])
    staged = ops.StagedIds(meta, torch.tensor([20]), handles, torch.tensor([0, 1]), [0])
    with pytest.raises(RuntimeError, match=rf"free_slots\[0\] is {slot}, expected a slot without"):
        ops.plan_moves_(tiers, staged, trains=False)
    assert torch.equal(tiers.places[0], places)
    assert torch.equal(tiers.slots[0], slots)


def test_a_stack_does_not_outgrow_its_slots() -> None:
    tiers, _ = one_free_slot()
    tiers.clock[1, Tier.FREE_COUNT] = 8
    with pytest.raises(RuntimeError, match="fewer free ones than tier_clock says"):
        ops.forget_rows_(tiers, 0, torch.tensor([5 << GENERATION_BITS | 1]))
