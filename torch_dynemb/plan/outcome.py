"""All that is said about a sample, as JSON has it."""

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
    """What tables are to be like.

    Attributes:
        rows: formats to choose from, the best first.
        times: how many times as long as the sample the stream is.
        ranks: which share the ids of every table.
        memory: bytes for tables on each of them; None: it is not known.
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
    """Return what a sample says about tables for its stream.

    Args:
        sources: names of the files.
        counts: of the ids of each column.
        missing: lines of each column without an id.
        wishes: what tables are to be like.
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
    """Of several columns; the ends of the interval are added, as if all erred the same way."""
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
    """Return the rows that each column's table has, of those of a choice; at least one.

    Up to the ids of the sample it is the most frequent ones of all columns. Beyond, each
    column has its part of the ids that are expected.
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
