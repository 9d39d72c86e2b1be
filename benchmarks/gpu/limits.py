"""Limits of ops: the least bytes and random accesses that they need, on this GPU.

Three things take time, and the slowest is the op's limit: bytes to and from memory, random accesses
to memory, and bytes between the L2 cache and the multiprocessors.

Counted as in the comments of the kernels in csrc/cuda, with what no implementation could leave
out:

* every distinct row, bucket line and generation is fetched from memory once, however often the
  batch repeats its id (repeats are served by the cache);
* every id, handle, gradient and output is read or written once;
* a random access moves at least a sector of 32 bytes;
* a random access counts once, however many bytes it moves, and a row that is read and written back
  counts once;
* bucket line, generation and row of every occurrence cross from L2 to a multiprocessor, also where
  the batch repeats its ids and memory is read once. In the backward, so does a gradient for every
  occurrence. Whatever else crosses memory crosses there too. What a multiprocessor's own cache
  keeps of that is not counted.

Left out, because they are ways and not needs: second probes, dedupe tables, the sort by row in
the backward (:func:`gradient_sort`), and state that stays in the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SECTOR = 32  # bytes
BUCKET_LINE = 64  # bytes: four keys and four handles
ID = HANDLE = OFFSET = SCORE = 8  # bytes

# optimizer -> tensors of optimizer state with a value per weight, and with one per row
STATES = {
    "SGD": (0, 0),
    "Adagrad": (1, 0),
    "RowWiseAdagrad": (0, 1),
    "Adam": (2, 0),
    "AdamW": (2, 0),
}


@dataclass(frozen=True)
class Shape:
    """A call.

    Attributes:
        ids: N, occurrences of ids.
        unique: U, distinct ids among them.
        bags: pooled outputs; None: a vector per id.
        dim: columns of a row.
    """

    ids: int
    unique: int
    bags: int | None
    dim: int

    @property
    def outputs(self) -> int:
        """Rows of the output and of its gradient."""
        return self.ids if self.bags is None else self.bags


@dataclass(frozen=True)
class Work:
    """Needs of a call.

    Attributes:
        bytes: to and from memory.
        accesses: random ones, to memory.
        l2_bytes: between L2 and the multiprocessors, in both directions.
    """

    bytes: float
    accesses: float
    l2_bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(
            self.bytes + other.bytes,
            self.accesses + other.accesses,
            self.l2_bytes + other.l2_bytes,
        )


@dataclass(frozen=True)
class Ceilings:
    """Rates of a GPU.

    Attributes:
        gb_per_s: copy bandwidth, bytes read and written, in 10^9.
        g_accesses_per_s: random 64-byte reads, in 10^9.
        l2_gb_per_s: bytes read from L2 by all multiprocessors, in 10^9.
        measured: by experiments.cu in the same run; False: assumed.
    """

    gb_per_s: float
    g_accesses_per_s: float
    l2_gb_per_s: float
    measured: bool = True

    def times_ms(self, work: Work) -> dict[str, float]:
        """Return the least time of each of the three."""
        return {
            "bytes": work.bytes / self.gb_per_s / 1e6,
            "accesses": work.accesses / self.g_accesses_per_s / 1e6,
            "L2 bytes": work.l2_bytes / self.l2_gb_per_s / 1e6,
        }

    def ms(self, work: Work) -> float:
        """Return the longest of the three."""
        return max(self.times_ms(work).values())

    def limited_by(self, work: Work) -> str:
        """``bytes``, ``accesses`` or ``L2 bytes``, whichever takes longest."""
        times = self.times_ms(work)
        return max(times, key=lambda name: times[name])


# Until experiments.cu has run on one: a copy was measured; the other two are guesses, that for L2
# from what reads of an H100's reach (5.5 to 7 TB/s).
ASSUMED_H200 = Ceilings(gb_per_s=4300.0, g_accesses_per_s=29.0, l2_gb_per_s=5500.0, measured=False)

# Of PCIe 5 with 16 lanes, each way while both are in use.
ASSUMED_HOST_LINK_GB_PER_S = 45.0


def _row_bytes(dim: int) -> int:
    """Return the bytes of a random row: whole sectors."""
    return max(math.ceil(4 * dim / SECTOR), 1) * SECTOR


def _offsets(shape: Shape) -> int:
    return 0 if shape.bags is None else (shape.bags + 1) * OFFSET


def find(shape: Shape) -> Work:
    """Return the work of a find: N (id + handle) + U lines, an access per line; L2: N lines."""
    in_order = shape.ids * (ID + HANDLE)
    return Work(
        in_order + shape.unique * BUCKET_LINE, shape.unique, in_order + shape.ids * BUCKET_LINE
    )


def find_or_insert(shape: Shape, *, scored: bool = False) -> Work:
    """Return the work for present ids: as :func:`find`; with scores, U more sectors written.

    L2: a sector for each occurrence.
    """
    work = find(shape)
    if not scored:
        return work
    return work + Work(shape.unique * SECTOR, shape.unique, shape.ids * SECTOR)


def stage(shape: Shape, missing: int) -> Work:
    """Return the work of finding slots in a cache: N handles read and written, U places and slots.

    A missing row is claimed, flagged and gets a slot: 16 bytes in order for each id. At random it
    takes two sectors, and those of the 96 slots that are searched for its victim.
    """
    in_order = shape.ids * (3 * HANDLE + HANDLE + 16)
    at_random = shape.unique * (4 + SECTOR) + missing * (2 * SECTOR + 96 * SECTOR)
    accesses = 2 * shape.unique + 2 * missing
    return Work(in_order + at_random, accesses, in_order + at_random)


def lookup_rows(shape: Shape) -> Work:
    """Return the work of a lookup: N handles, offsets, outputs of 4 D, U generations, U rows.

    L2: N generations and rows instead.
    """
    in_order = shape.ids * HANDLE + _offsets(shape) + shape.outputs * 4 * shape.dim
    looked_up = SECTOR + _row_bytes(shape.dim)
    return Work(
        in_order + shape.unique * looked_up, 2 * shape.unique, in_order + shape.ids * looked_up
    )


def backward(shape: Shape, optimizer: str) -> Work:
    """Return the work of a backward: N handles, offsets, gradients; U rows and states, twice.

    Accesses: generation, row and each state tensor, U each. L2: N gradients of 4 D, also where bags
    share one.
    """
    element_states, row_states = STATES[optimizer]
    handles = shape.ids * HANDLE + _offsets(shape)
    row = 2 * (1 + element_states) * _row_bytes(shape.dim) + 2 * row_states * SECTOR
    updated = shape.unique * (SECTOR + row)
    accesses = 2 + element_states + row_states
    return Work(
        handles + shape.outputs * 4 * shape.dim + updated,
        accesses * shape.unique,
        handles + shape.ids * 4 * shape.dim + updated,
    )


def gradient_sort(shape: Shape, rows: int) -> Work:
    """Return the work that the sort by row adds to a backward: nothing at random.

    Keys, positions and bags are written (12 bytes) and sorted 8 bits at a time: 4 bytes are read
    for the histogram, 16 read and written a pass. Then they are turned into runs (24 bytes).
    """
    passes = math.ceil(max(math.ceil(math.log2(rows + 1)), 1) / 8)
    moved = shape.ids * (12 + 4 + 16 * passes + 24)
    return Work(moved, 0, moved)


def lookup_parts(shape: Shape) -> list[Work]:
    """Return the work of a lookup: find, then the rows."""
    return [find(shape), lookup_rows(shape)]


def step_parts(shape: Shape, optimizer: str) -> list[Work]:
    """Return the work of a training step: find, lookup, backward, one after the other."""
    return [find_or_insert(shape), lookup_rows(shape), backward(shape, optimizer)]


def total(parts: list[Work]) -> Work:
    """Return the sum of works."""
    return sum(parts, Work(0, 0, 0))


def limit_ms(parts: list[Work], ceilings: Ceilings) -> float:
    """Return the time of parts that run one after the other, each at its own limit."""
    return sum(ceilings.ms(work) for work in parts)
