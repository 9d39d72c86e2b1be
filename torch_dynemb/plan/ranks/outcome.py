"""The model of ranks, in the structure of its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from torch_dynemb.plan.counting import IdCounts
from torch_dynemb.plan.growth import DistinctIds
from torch_dynemb.plan.ranks.demand import ColumnDemand, column_demand
from torch_dynemb.plan.ranks.fullest import fullest
from torch_dynemb.plan.ranks.layouts import (
    DEDUPED,
    SHARDINGS,
    PlacedColumns,
    Sharding,
    placed,
)
from torch_dynemb.plan.ranks.options import RankWishes
from torch_dynemb.plan.ranks.traffic import ModelledStep, traffic_of
from torch_dynemb.plan.sizes import PlannedRow, in_memory

KINDS = ("splits", "lengths", "ids", "rows", "gradients")
_LEAST_THROUGHPUT = 0.5  # of a rank, of that with the fewest ranks


def modelled(
    counts: Mapping[str, IdCounts],
    later: Mapping[str, DistinctIds],
    row: PlannedRow,
    wishes: RankWishes,
) -> dict[str, Any]:
    """Compute the training step of each sharding type on each number of ranks.

    Args:
        counts: of the ids of each column.
        later: ids of each column in the whole stream; tables have room for the upper ends.
        row: format of rows.
        wishes: the cluster.
    """
    columns = [column_demand(counted, later[name].high) for name, counted in counts.items()]
    variants = [(sharding, dedup) for sharding in SHARDINGS for dedup in _dedups(sharding)]
    numbers = _compared(wishes)
    cases = [
        case_of(columns, row, wishes, ranks, sharding, dedup=dedup)
        for sharding, dedup in variants
        for ranks in numbers
    ]
    paying = [
        _pays([c for c in cases if (c["sharding"], c["dedup"]) == variant]) for variant in variants
    ]
    return {
        "ranks": wishes.ranks,
        "batch": wishes.batch,
        "ranks_per_node": wishes.node_size,
        "link_bytes_per_second": wishes.links.between,
        "node_link_bytes_per_second": wishes.links.inside,
        "latency_seconds": wishes.links.latency,
        "cores": wishes.cores,
        "per_second": wishes.per_second,
        "extrapolates_lines": wishes.batch > max(column.counts.lines for column in columns),
        "row": asdict(row),
        "costs": asdict(wishes.costs),
        "cases": cases,
        "pays_up_to": paying,
    }


def case_of(
    columns: Sequence[ColumnDemand],
    row: PlannedRow,
    wishes: RankWishes,
    ranks: int,
    sharding: Sharding,
    *,
    dedup: bool,
) -> dict[str, Any]:
    """Compute the training step of a sharding type on a number of ranks.

    Args:
        columns: ids of each table.
        row: format of rows.
        wishes: the cluster; its numbers of ranks are ignored.
        ranks: number of ranks.
        sharding: type.
        dedup: whether every rank sends each of its ids once.
    """
    pieces, step = modelled_step(columns, row, wishes, ranks, sharding, dedup=dedup)
    rows_of_fullest = fullest(step.rows, step.rows_variance)
    memory = _memory(pieces, columns, row, ranks)
    by_chance = rows_of_fullest / float(step.rows.max()) if rows_of_fullest else 1.0
    busiest = fullest(step.ids, step.variances)
    seconds = _seconds(step, busiest, wishes, ranks)
    return {
        "sharding": sharding,
        "dedup": dedup,
        "ranks": ranks,
        "column_shards": len(pieces) // max(len(columns), 1),
        "sent": _bytes(step, sent=True),
        "received": _bytes(step, sent=False),
        "fullest": {
            "lookups": _relative(busiest, step.ids),
            "lookups_in_the_long_run": _relative(float(step.ids.max()), step.ids),
            "rows": _relative(rows_of_fullest, step.rows),
        },
        "memory": {
            "mean": round(float(memory.mean())),
            "fullest": round(float(memory.max()) * by_chance),
        },
        "seconds": {**seconds, "step": sum(seconds.values())},
        "lines_per_second_of_a_rank": wishes.batch / ranks / sum(seconds.values()),
    }


def modelled_step(
    columns: Sequence[ColumnDemand],
    row: PlannedRow,
    wishes: RankWishes,
    ranks: int,
    sharding: Sharding,
    *,
    dedup: bool,
) -> tuple[list[PlacedColumns], ModelledStep]:
    """Place tables; return their pieces, and the bytes and work of a step.

    Args:
        columns, row, wishes, ranks, sharding, dedup: as those of :func:`case_of`.
    """
    cluster = wishes.cluster(ranks)
    loads = [column.ids_per_line for column in columns]
    pieces = placed(sharding, loads, row.dim, cluster, least=wishes.min_columns)
    group = row.group()
    row_bytes = group.row_bytes(group.slabs[0])
    return pieces, traffic_of(
        pieces, columns, cluster, batch=wishes.batch, row_bytes=row_bytes, dedup=dedup
    )


def _dedups(sharding: Sharding) -> tuple[bool, ...]:
    return (False, True) if sharding in DEDUPED else (False,)


def _compared(wishes: RankWishes) -> list[int]:
    """Return the wanted numbers of ranks, and doublings between the smallest and the largest."""
    numbers = set(wishes.ranks)
    between = wishes.ranks[0]
    while between < wishes.ranks[-1]:
        if wishes.is_even(between):
            numbers.add(between)
        between *= 2
    return sorted(numbers)


def _memory(
    pieces: Sequence[PlacedColumns], columns: Sequence[ColumnDemand], row: PlannedRow, ranks: int
) -> Tensor:
    """Return the bytes of tables on each rank, with even shares of shared ids."""
    memory = torch.zeros(ranks, dtype=torch.float64, device="cpu")
    bytes_of_id: dict[int, float] = {}  # by width
    for piece in pieces:
        if piece.width not in bytes_of_id:
            part = replace(row, dim=piece.width)
            bytes_of_id[piece.width] = in_memory(part, 1_000_000, ranks=1).memory / 1e6
        ids = columns[piece.table].total / len(piece.ranks)
        memory[piece.ranks.start : piece.ranks.stop] += ids * bytes_of_id[piece.width]
    return memory


def _bytes(step: ModelledStep, *, sent: bool) -> dict[str, Any]:
    """Return the bytes of a rank by kind, on average, and all of the rank with the most."""
    of_ranks = torch.zeros_like(step.ids)
    means = dict.fromkeys(KINDS, 0.0)
    to_others = 0.0
    for exchange in step.exchanges:
        moved = exchange.sent if sent else exchange.received
        means[exchange.kind] += float(moved.sum(1).mean())
        to_others += float(moved[:, 1].mean())
        of_ranks += moved.sum(1)
    return {
        **{kind: round(mean) for kind, mean in means.items()},
        "total": round(sum(means.values())),
        "between_nodes": round(to_others),
        "busiest_rank": round(float(of_ranks.max())),
    }


def _relative(most: float, of_ranks: Tensor) -> float:
    mean = float(of_ranks.mean())
    return most / mean if mean else 1.0


def _seconds(
    step: ModelledStep, busiest: float, wishes: RankWishes, ranks: int
) -> dict[str, float]:
    """Return the time of the slowest rank's own work, and of the exchanges."""
    beyond = busiest / float(step.ids.max()) if busiest else 1.0
    work = step.work._replace(
        ids_received=step.work.ids_received * beyond, row_bytes=step.work.row_bytes * beyond
    )
    seconds = float(wishes.costs.seconds(work).max())
    if wishes.cores is not None:
        of_nodes = wishes.costs.seconds(step.work).view(-1, wishes.cluster(ranks).local).sum(1)
        seconds = max(seconds, float(of_nodes.max()) / wishes.cores)
    links = sum(exchange.seconds(wishes.links) for exchange in step.exchanges)
    return {"own_work": seconds, "links": links}


def _pays(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the largest number of ranks that still pays, and the reason why more do not."""
    first = previous = cases[0]
    reason = None
    for case in cases[1:]:
        least = _LEAST_THROUGHPUT * first["lines_per_second_of_a_rank"]
        if case["seconds"]["step"] >= previous["seconds"]["step"]:
            reason = "the step takes no less time"
        elif case["lines_per_second_of_a_rank"] < least:
            reason = "a rank does less than half of its lines a second"
        if reason is not None:
            break
        previous = case
    return {
        "sharding": first["sharding"],
        "dedup": first["dedup"],
        "ranks": previous["ranks"],
        "reason": reason,
    }


__all__ = ["KINDS", "case_of", "modelled", "modelled_step"]
