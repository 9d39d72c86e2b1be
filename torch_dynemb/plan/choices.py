"""Ways to keep the ids of a stream, what they take, and which of them to choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_dynemb.plan.counting import IdCounts
from torch_dynemb.plan.coverage import Coverage
from torch_dynemb.plan.growth import DistinctIds
from torch_dynemb.plan.sizes import Bytes, PlannedRow, in_memory, most_ids, on_disk
from torch_dynemb.policy.admission import AdmitFrequent
from torch_dynemb.policy.policy import Policy

_PRECISIONS = (  # in the order in which they are tried
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "uint8"),
)
ALL, SEEN_TWICE = "all ids", "ids seen twice"
EVICT, FILES = "evict the rarest", "files (CPU)"
_CACHED = 0.25  # of the rows of files, where nothing says how much memory there is
_EVICTING = Policy(score="frequency", capacity=1)


class Need(NamedTuple):
    """What tables are to hold.

    Attributes:
        ids: all distinct ids.
        repeated: those that are seen more than once.
        coverage: lookups by rank of frequency, in the sample.
    """

    ids: DistinctIds
    repeated: DistinctIds
    coverage: Coverage


@dataclass(frozen=True)
class Choice:
    """A way to keep ids.

    Attributes:
        how: in words.
        row: what rows are like.
        ids: that have a row, on all ranks together.
        coverage: the part of later lookups that finds a row in memory, at least.
        bytes: of a rank.
        fits: whether these are in the memory of a rank; None: how much it has is not known.
        policy: the code that says it.
    """

    how: str
    row: PlannedRow
    ids: int
    coverage: float
    bytes: Bytes
    fits: bool | None
    policy: str


def needed(columns: Sequence[IdCounts], all_ids: DistinctIds) -> Need:
    """Return what tables are to hold.

    The part of ids that are seen once is taken to be that of the sample, as it is where the number
    of ids grows by a power of the lines.

    Args:
        columns: counts of the ids of each.
        all_ids: how many there will be.
    """
    now = sum(column.distinct for column in columns)
    repeated = 1 - sum(column.seen(1) for column in columns) / now if now else 1.0
    return Need(all_ids, DistinctIds(*(repeated * x for x in all_ids)), Coverage(columns))


def row_formats(
    dim: int, optimizer: str, dtype: str | None, state_dtype: str | None
) -> list[PlannedRow]:
    """Format of rows to choose from, the most precise one first.

    Args:
        dim: columns of a row.
        optimizer: a name in :data:`torch_dynemb.plan.sizes.OPTIMIZERS`.
        dtype: of rows; None: any.
        state_dtype: of the optimizer's state; None: any.

    Raises:
        ValueError: a dtype that is asked for is not there.
    """
    wanted = [(dtype or of_rows, state_dtype or of_state) for of_rows, of_state in _PRECISIONS]
    formats = []
    for of_rows, of_state in dict.fromkeys(wanted):
        try:
            formats.append(PlannedRow(dim, optimizer, of_rows, of_state))
        except ValueError:
            if state_dtype is not None or of_state == "float32":
                raise
    return formats


def choices(
    need: Need, rows: Sequence[PlannedRow], *, ranks: int, memory: int | None
) -> list[Choice]:
    """Return what can be done, the best first.

    Tables are made large enough for the upper end of the interval.

    Args:
        need: what they are to hold.
        rows: formats to choose from, the best first.
        ranks: which share the ids of every table.
        memory: bytes for tables on each of them; None: it is not known.
    """
    ids = math.ceil(need.ids.high)
    repeated = min(ids, math.ceil(need.repeated.high))

    def fits(size: Bytes) -> bool | None:
        return None if memory is None else size.memory <= memory

    found = []
    for row in rows:
        size = in_memory(row, ids, ranks=ranks)
        policy = "td.Policy()"
        found.append(Choice(ALL, row, ids, 1.0, size, fits(size), policy))
    for row in rows:
        admission = Policy(admission=AdmitFrequent(2))
        size = in_memory(row, repeated, ranks=ranks, policy=admission, counted=ids - repeated)
        policy = "td.Policy(admission=td.AdmitFrequent(2))"
        share = need.coverage.later_share_of_repeated
        found.append(Choice(SEEN_TWICE, row, repeated, share, size, fits(size), policy))
    if memory is not None:
        for row in rows:
            capacity = min(ids, most_ids(row, memory, ranks=ranks, policy=_EVICTING))
            if capacity == 0 or capacity == ids:
                continue
            policy = f'td.Policy(score="frequency", capacity={capacity})'
            size = in_memory(
                row, capacity, ranks=ranks, policy=Policy(score="frequency", capacity=capacity)
            )
            share = need.coverage.later_share(capacity, ids)
            found.append(Choice(EVICT, row, capacity, share, size, fits(size), policy))
    for row in rows[:1]:
        cached = _cached(row, ids, ranks, memory)
        size = on_disk(row, ids, cached, ranks=ranks)
        share = need.coverage.later_share(cached, ids)
        policy = f'storage=td.SSDStore(path, cache="{max(1, cached // ranks)} rows")'
        found.append(Choice(FILES, row, ids, share, size, fits(size), policy))
    return found


def _cached(row: PlannedRow, ids: int, ranks: int, memory: int | None) -> int:
    """Return rows of files that are in memory, on all ranks."""
    if memory is None:
        return math.ceil(_CACHED * ids)
    few, more = (on_disk(row, ids, n * ranks, ranks=ranks).memory for n in (1000, 2000))
    of_rank = 1000 + (memory - few) * 1000 // (more - few)
    return max(0, min(ids, of_rank * ranks))


def suggested(found: Sequence[Choice]) -> Choice | None:
    """Return the first way that fits; None: none does, or it is not known what would.

    Of those that evict ids it is the one that serves the most lookups. Files come last.
    """
    fitting = [choice for choice in found if choice.fits]
    evicting = [choice for choice in fitting if choice.how == EVICT]
    if fitting and fitting[0] in evicting:
        return max(evicting, key=lambda choice: choice.coverage)
    return fitting[0] if fitting else None


__all__ = ["EVICT", "FILES", "Choice", "Need", "choices", "needed", "row_formats", "suggested"]
