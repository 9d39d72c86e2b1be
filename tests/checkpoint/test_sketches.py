"""Sketches of parts as one: counts are never too small, whatever widths and parts are."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_dynemb.ops.columns import SKETCH_ROWS
from torch_dynemb.rows.sketches import combined_sketch
from torch_dynemb.table.shards import IdSlots

pytestmark = pytest.mark.cpu_only("about tensors of the CPU")

MOST = 2**31 - 1
# where an id's hash lies in each row, as a fraction of all hashes, and how often it was seen
IDS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2**16 - 1), min_size=SKETCH_ROWS, max_size=SKETCH_ROWS),
        st.integers(1, 2**30),
    ),
    min_size=1,
    max_size=20,
)


def cells_of(hashes: list[int], width: int) -> list[int]:
    """The cell of each row: that of one of ``width`` equal ranges of hashes."""
    return [int(Fraction(of, 2**16) * width) for of in hashes]


def sketch_of(ids: list[tuple[list[int], int]], width: int) -> Tensor:
    """Counts of ids with conservative update: cells grow only as far as the new count."""
    sketch = torch.zeros(SKETCH_ROWS, width, dtype=torch.int64)
    rows = torch.arange(SKETCH_ROWS)
    for hashes, count in ids:
        cells = torch.tensor(cells_of(hashes, width))
        new = min(MOST, int(sketch[rows, cells].min()) + count)
        sketch[rows, cells] = sketch[rows, cells].clamp(min=new)
    return sketch.to(torch.int32)


@given(IDS, st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(1, 12))
def test_counts_are_upper_bounds(
    ids: list[tuple[list[int], int]], widths: list[int], width: int
) -> None:
    """From parts of some widths to one of another, and from there to parts again."""
    parts = [ids[k :: len(widths)] for k in range(len(widths))]
    saved = [sketch_of(part, of) for part, of in zip(parts, widths, strict=True)]
    combined = combined_sketch(saved, width)
    assert combined.dtype == torch.int32
    assert combined.shape == (SKETCH_ROWS, width)
    back = [combined_sketch([combined], of) for of in widths]
    rows = torch.arange(SKETCH_ROWS)
    true: dict[tuple[int, ...], int] = {}
    for hashes, count in ids:
        true[tuple(hashes)] = true.get(tuple(hashes), 0) + count
    for hashes, count in true.items():
        for sketch in (combined, *back):
            cells = torch.tensor(cells_of(list(hashes), sketch.shape[1]))
            assert int(sketch[rows, cells].min()) >= min(count, MOST)


@given(
    st.lists(
        st.lists(st.integers(0, MOST), min_size=SKETCH_ROWS * 3, max_size=SKETCH_ROWS * 3),
        min_size=1,
        max_size=4,
    )
)
def test_equal_widths_are_added_by_cell(counts: list[list[int]]) -> None:
    sketches = [torch.tensor(of, dtype=torch.int32).reshape(SKETCH_ROWS, 3) for of in counts]
    expected = torch.stack([of.long() for of in sketches]).sum(0).clamp(max=MOST)
    assert torch.equal(combined_sketch(sketches, 3), expected.to(torch.int32))


SLOTS = st.integers(1, 24).flatmap(
    lambda slots: st.tuples(st.integers(0, slots - 1), st.integers(1, slots), st.just(slots)).map(
        lambda of: IdSlots(min(of[0], of[1] - 1), of[1], of[2])
    )
)


@given(SLOTS, SLOTS)
def test_parts_share_ids_where_one_is_of_both(one: IdSlots, other: IdSlots) -> None:
    """Against all residues: slots of an id are its mix modulo the number of slots."""
    shared = any(
        one.begin <= mix % one.slots < one.end and other.begin <= mix % other.slots < other.end
        for mix in range(one.slots * other.slots)
    )
    assert one.shares(other) == other.shares(one) == shared


def test_the_ids_of_all_parts_are_all_ids() -> None:
    ids = torch.randint(-(2**62), 2**62, (500,), generator=torch.Generator().manual_seed(0))
    for slots in (1, 2, 5, 64):
        owned = [IdSlots(k, k + 1, slots).owned(ids) for k in range(slots)]
        assert torch.equal(torch.stack(owned).sum(0), torch.ones(500, dtype=torch.int64))
    halves = [IdSlots(0, 20, 64).owned(ids), IdSlots(20, 64, 64).owned(ids)]
    assert torch.equal(halves[0], ~halves[1])
    assert halves[0].any()
