"""Ways to keep the ids of a stream, with their sizes, and a suggestion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_dynemb.plan.counting import IdCounts
from torch_dynemb.plan.coverage import Coverage
from torch_dynemb.plan.growth import DistinctIds
from torch_dynemb.plan.sizes import Bytes, PlannedRow, in_memory, most_ids, on_disk
from torch_dynemb.policy import AdmitFrequent, Policy

_PRECISIONS = (  # in the order of trial
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "uint8"),
)
ALL, SEEN_TWICE = "all ids", "ids seen twice"
EVICT, FILES = "evict the rarest", "files (CPU)"
_CACHED = 0.25  # share of rows in memory, if the memory is unknown
_EVICTING = Policy(score="frequency", capacity=1)


class Need(NamedTuple):
    """Content that tables must hold.

    Attributes:
        ids: number of distinct ids.
        repeated: number of ids that occur more than once.
        coverage: lookups by rank of frequency, in the sample.
    """

    ids: DistinctIds
    repeated: DistinctIds
    coverage: Coverage


@dataclass(frozen=True)
class Choice:
    """Way to keep ids.

    Attributes:
        how: description.
        row: format of rows.
        ids: number of ids with a row, over all ranks.
        coverage: lower estimate of the share of later lookups that find a row in memory.
        bytes: of a rank.
        fits: whether the bytes fit into the memory of a rank; None: its memory is unknown.
        policy: code of the choice.
    """

    how: str
    row: PlannedRow
    ids: int
    coverage: float
    bytes: Bytes
    fits: bool | None
    policy: str


def needed(columns: Sequence[IdCounts], all_ids: DistinctIds) -> Need:
    """Return the content that tables must hold.

    The share of ids that occur once is taken from the sample. This holds if the number of ids
    grows by a power of the lines.

    Args:
        columns: counts of the ids of each.
        all_ids: expected number of ids.
    """
    now = sum(column.distinct for column in columns)
    repeated = 1 - sum(column.seen(1) for column in columns) / now if now else 1.0
    return Need(all_ids, DistinctIds(*(repeated * x for x in all_ids)), Coverage(columns))


def row_formats(
    dim: int, optimizer: str, dtype: str | None, state_dtype: str | None
) -> list[PlannedRow]:
    """List the formats of rows to choose from, the most precise one first.

    Args:
        dim: columns of a row.
        optimizer: a name in :data:`torch_dynemb.plan.sizes.OPTIMIZERS`.
        dtype: of rows; None: any.
        state_dtype: of the optimizer's state; None: any.

    Raises:
        ValueError: a requested dtype is not available.
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
    """List the choices, the best first.

    Tables are large enough for the upper end of the interval.

    Args:
        need: content that tables must hold.
        rows: formats to choose from, the best first.
        ranks: number of ranks that share the ids of every table.
        memory: bytes for tables on each rank; None: unknown.
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
    """Return the number of cached rows of files, over all ranks."""
    if memory is None:
        return math.ceil(_CACHED * ids)
    few, more = (on_disk(row, ids, n * ranks, ranks=ranks).memory for n in (1000, 2000))
    of_rank = 1000 + (memory - few) * 1000 // (more - few)
    return max(0, min(ids, of_rank * ranks))


def suggested(found: Sequence[Choice]) -> Choice | None:
    """Return the first choice that fits; None: none fits, or the memory is unknown.

    Of choices that evict ids, take the one that serves the most lookups. Files come last.
    """
    fitting = [choice for choice in found if choice.fits]
    evicting = [choice for choice in fitting if choice.how == EVICT]
    if fitting and fitting[0] in evicting:
        return max(evicting, key=lambda choice: choice.coverage)
    return fitting[0] if fitting else None


__all__ = ["EVICT", "FILES", "Choice", "Need", "choices", "needed", "row_formats", "suggested"]
