"""The plan of a sample, in the structure of its JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from torch_dynemb.plan.choices import Choice, choices, needed, suggested
from torch_dynemb.plan.counting import IdCounts
from torch_dynemb.plan.coverage import Coverage, rank_load
from torch_dynemb.plan.growth import DistinctIds, distinct_ids
from torch_dynemb.plan.sizes import PlannedRow

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99, 0.999)
_TIMES = (1.0, 2.0, 10.0, 100.0)


class Wishes(NamedTuple):
    """Requirements of tables.

    Attributes:
        rows: formats to choose from, the best first.
        times: length of the stream as a multiple of the sample.
        ranks: number of ranks that share the ids of every table.
        memory: bytes for tables on each rank; None: unknown.
    """

    rows: Sequence[PlannedRow]
    times: float
    ranks: int
    memory: int | None


def outcome(
    sources: Sequence[str],
    counts: Mapping[str, IdCounts],
    missing: Mapping[str, int],
    wishes: Wishes,
) -> dict[str, Any]:
    """Plan the tables of a stream from a sample.

    Args:
        sources: names of the files.
        counts: of the ids of each column.
        missing: lines of each column without an id.
        wishes: requirements of tables.
    """
    columns = list(counts.values())
    lines = max((column.lines for column in columns), default=0)
    later = {name: distinct_ids(column, wishes.times) for name, column in counts.items()}
    need = needed(columns, _sum(list(later.values())))
    found = choices(need, wishes.rows, ranks=wishes.ranks, memory=wishes.memory)
    chosen = suggested(found)
    capacities = None if chosen is None else _by_column(chosen, need.coverage, counts, later)
    lookups = sum(column.lookups for column in columns)
    once = sum(column.seen(1) for column in columns)
    load = rank_load(columns, wishes.ranks)
    return {
        "sources": list(sources),
        "lines": lines,
        "total_lines": round(lines * wishes.times),
        "lookups": lookups,
        "missing": sum(missing.values()),
        "ranks": wishes.ranks,
        "device_memory": wishes.memory,
        "columns": {
            name: {
                "lookups": column.lookups,
                "missing": missing[name],
                "sampled": column.sampled,
                "kept_ids": column.ids.numel(),
                "distinct": round(column.distinct),
                "total": _rounded(later[name]),
                "seen_once": round(column.seen(1)),
                "ids_for_99_percent": math.ceil(Coverage([column]).capacity(0.99)),
                "rows": None if capacities is None else capacities[name],
            }
            for name, column in counts.items()
        },
        "distinct": round(need.coverage.ids),
        "total": _rounded(need.ids),
        "seen_once": round(once),
        "known_lookups": 1 - once / lookups if lookups else 0.0,
        "growth": [
            {
                "lines": round(lines * times),
                **_rounded(_sum([distinct_ids(column, times) for column in columns])),
            }
            for times in sorted({*_TIMES, wishes.times})
        ],
        "coverage": [
            {"share": share, "ids": math.ceil(need.coverage.capacity(share))} for share in SHARES
        ],
        "busiest_rank": load.busiest,
        "choices": [_described(choice) for choice in found],
        "suggestion": None if chosen is None else found.index(chosen),
    }


def _sum(parts: Sequence[DistinctIds]) -> DistinctIds:
    """Add several columns; interval ends are added, as if all errors had the same sign."""
    return DistinctIds(*(sum(ends) for ends in zip(*parts, strict=True)))


def _rounded(ids: DistinctIds) -> dict[str, int]:
    return {
        "low": math.floor(ids.low),
        "expected": round(ids.expected),
        "high": math.ceil(ids.high),
    }


def _by_column(
    choice: Choice,
    coverage: Coverage,
    counts: Mapping[str, IdCounts],
    later: Mapping[str, DistinctIds],
) -> dict[str, int]:
    """Divide the rows of a choice by column, at least one each.

    Up to the number of ids in the sample, the most frequent ids of all columns have rows. Beyond
    it, each column has its share of the expected ids.
    """
    ends = [ids.high for ids in later.values()]
    if choice.ids < coverage.ids:
        wanted = coverage.divided(choice.ids)
    else:
        whole = sum(ends) or 1.0
        wanted = [choice.ids * end / whole for end in ends]
    return {name: max(1, math.ceil(rows)) for name, rows in zip(counts, wanted, strict=True)}


def _described(choice: Choice) -> dict[str, Any]:
    size = choice.bytes
    return {
        "how": choice.how,
        "row": asdict(choice.row),
        "ids": choice.ids,
        "coverage": choice.coverage,
        "bytes_of_a_rank": {
            "memory": {
                "rows": size.rows,
                "state": size.state,
                "index": size.index,
                "total": size.memory,
            },
            "disk": size.disk,
        },
        "fits": choice.fits,
        "code": choice.policy,
    }


__all__ = ["SHARES", "Wishes", "outcome"]
