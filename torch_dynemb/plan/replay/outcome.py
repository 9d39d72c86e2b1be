"""A replay, in the structure of its JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb.plan.counting import IdCounts
from torch_dynemb.plan.coverage import Coverage
from torch_dynemb.plan.lines import ColumnIds, Lines
from torch_dynemb.plan.replay.auc import Placements, error_of_difference, placements
from torch_dynemb.plan.replay.grammar import PolicyText
from torch_dynemb.plan.replay.progress import progress
from torch_dynemb.plan.replay.recording import Recording, Roles, lines_between
from torch_dynemb.plan.replay.runs import Run, Used, batch_of_lines, policies_of
from torch_dynemb.plan.replay.sampling import automatic_share, is_sampled, rates, spread
from torch_dynemb.plan.replay.step_cost import DEVICES, step_cost
from torch_dynemb.plan.sizes import PlannedRow, in_memory
from torch_dynemb.policy import Policy

TRAINED = 0.9  # of the lines; the later ones are held out for the AUC
AUC_MARGIN = 0.0005  # below that of unlimited tables
UNLIMITED = "all ids"


@dataclass(frozen=True)
class ReplayWishes:
    """Settings of a replay.

    Attributes:
        policies: to compare.
        capacities: to compare: shares of the distinct ids (float), or numbers of ids of all tables.
        roles: columns of label and time.
        batch_size: lines of a step.
        sample_ids: share of the ids to replay; None: automatic.
    """

    policies: Sequence[PolicyText]
    capacities: Sequence[float | int]
    roles: Roles
    batch_size: int
    sample_ids: float | None


class Combination(NamedTuple):
    """A policy with a capacity.

    Attributes:
        policy: None: unlimited tables.
        ids: capacity of all tables.
        rows: capacity of each column's table; None: unlimited.
    """

    policy: PolicyText | None
    ids: int
    rows: dict[str, int] | None


class _Stream(NamedTuple):
    """Numbers of a stream.

    Attributes:
        lines: that tables are trained on.
        steps: of these lines.
        counted: lookups from the middle of these steps on, of all ids.
        distinct: ids.
        share: of the ids of large columns that are replayed.
        rates: share of the ids that are replayed, by column.
    """

    lines: int
    steps: int
    counted: int
    distinct: float
    share: float
    rates: dict[str, float]


def replayed(
    recording: Recording,
    counts: Mapping[str, IdCounts],
    row: PlannedRow,
    ranks: int,
    wishes: ReplayWishes,
) -> dict[str, Any]:
    """Compare tables of every policy and capacity by a stream that passes through them.

    Args:
        recording: of the stream.
        counts: of the ids of each column.
        row: format of the rows that memory is computed for.
        ranks: number of ranks that share them.
        wishes: what to compare.

    Raises:
        ValueError: the labels leave nothing to compare.
    """
    roles = wishes.roles
    lines = recording.lines
    if roles.label is not None:
        _check_both_labels(roles.label, recording.labels, "the sample has")
        lines = math.floor(TRAINED * lines)
    combinations = _combinations(counts, wishes)
    lookups = sum(column.lookups for column in counts.values())
    share = wishes.sample_ids
    if share is None:
        share = 1.0 if roles.label is not None else automatic_share(lookups, len(combinations))
    limited = [combination.rows for combination in combinations if combination.rows is not None]
    sampled = rates(counts, limited, share)
    steps = -(-lines // wishes.batch_size)
    runs = [
        Run(
            policies_of(combination.policy, combination.rows, steps, sampled),
            trains=roles.label is not None,
            by_group=min(sampled.values()) < 1,
        )
        for combination in combinations
    ]
    counted, labels = _play(recording, runs, wishes, lines, sampled)
    distinct = sum(column.distinct for column in counts.values())
    stream = _Stream(lines, steps, counted, distinct, share, sampled)
    judged: list[Placements | None] = [None] * len(runs)
    if roles.label is not None:
        _check_both_labels(
            roles.label,
            set(labels.tolist()),
            f"the last {recording.lines - lines} lines, which are held out, have",
        )
        judged = [placements(labels > 0.5, run.predicted()) for run in runs]
    found = [
        _described(combination, run.used(), auc, judged[0], stream, row, ranks)
        for combination, run, auc in zip(combinations, runs, judged, strict=True)
    ]
    return {
        "lines": recording.lines,
        "trained_lines": lines,
        "batch_size": wishes.batch_size,
        "steps": steps,
        "counted_lookups": counted,
        "sample_ids": share,
        "sampled_columns": {name: rate for name, rate in sampled.items() if rate < 1},
        "label": roles.label,
        "time": roles.time,
        "row": {"dim": row.dim, "optimizer": row.optimizer, "dtype": row.dtype},
        "runs": found,
        "auc_margin": AUC_MARGIN,
        "suggestion": _suggestion(found),
    }


def _check_both_labels(name: str, labels: set[float], subject: str) -> None:
    if labels != {0.0, 1.0}:
        has = f"the label {labels.pop():g} alone" if labels else "no line"
        raise ValueError(
            f"--label: {name} must be 0 and 1, and {subject} {has}: give more lines, or name "
            "another column"
        )


def _combinations(counts: Mapping[str, IdCounts], wishes: ReplayWishes) -> list[Combination]:
    """List unlimited tables, then every policy with every capacity, the smallest one first."""
    columns = list(counts.values())
    coverage = Coverage(columns)
    distinct = math.ceil(sum(column.distinct for column in columns))
    found = [Combination(None, distinct, None)]
    wanted = {
        min(
            distinct, max(len(columns), round(size * distinct) if isinstance(size, float) else size)
        )
        for size in wishes.capacities
    }
    for policy in wishes.policies:
        for ids in sorted(wanted):
            parts = coverage.divided(ids)
            rows = {name: max(1, math.ceil(size)) for name, size in zip(counts, parts, strict=True)}
            found.append(Combination(policy, sum(rows.values()), rows))
    return found


def _play(
    recording: Recording,
    runs: Sequence[Run],
    wishes: ReplayWishes,
    lines: int,
    sampled: Mapping[str, float],
) -> tuple[int, Tensor]:
    """Pass all lines through tables; return counted lookups, and labels of held-out lines."""
    roles, size = wishes.roles, wishes.batch_size
    half = -(-lines // size) // 2 * size
    counted, labels, done = 0, [], 0
    with progress(recording.lines * len(runs)) as advance:
        for chunk in recording.chunks():
            edges = {*range(0, chunk.count, size), chunk.count}
            if 0 < lines - done < chunk.count:
                edges.add(lines - done)
            places = sorted(edges)
            counted += _lookups(chunk, half - done, lines - done)
            chosen = _sampled_lines(chunk, sampled)
            for begin, end in itertools.pairwise(places):
                part = lines_between(chosen, begin, end)
                step = batch_of_lines(part, roles.label, roles.time)
                trains = done + begin < lines
                if not trains:
                    labels.append(part.values[roles.label or ""])
                for run in runs:
                    if trains:
                        run.play(step, counts=done + begin >= half)
                    else:
                        run.predict(step)
                    advance(end - begin)
            done += chunk.count
    return counted, torch.cat(labels) if labels else torch.empty(0, device="cpu")


def _lookups(chunk: Lines, begin: int, end: int) -> int:
    """Return the number of ids of lines of a chunk, from the first of which both are counted."""
    begin, end = (max(0, min(line, chunk.count)) for line in (begin, end))
    return sum(column.ids.numel() for column in lines_between(chunk, begin, end).columns.values())


def _sampled_lines(chunk: Lines, sampled: Mapping[str, float]) -> Lines:
    columns = {}
    for name, column in chunk.columns.items():
        columns[name] = column
        if sampled[name] < 1:
            chosen = is_sampled(column.ids, sampled[name])
            columns[name] = ColumnIds(column.ids[chosen], column.lines[chosen], 0)
    return Lines(chunk.count, columns, chunk.values)


def _described(
    combination: Combination,
    used: Used,
    auc: Placements | None,
    unlimited: Placements | None,
    stream: _Stream,
    row: PlannedRow,
    ranks: int,
) -> dict[str, Any]:
    column_rates = list(stream.rates.values())

    def scaled(numbers: Sequence[int]) -> float:
        return sum(number / rate for number, rate in zip(numbers, column_rates, strict=True))

    counted = max(stream.counted, 1)
    misses = scaled(used.misses.sum(1).tolist()) / counted
    evicted = scaled(used.evicted)
    policy = Policy()
    if combination.policy is not None:
        policy = combination.policy.policy(combination.ids, stream.steps)
    size = in_memory(row, combination.ids, ranks=ranks, policy=policy, counted=scaled(used.counted))
    lookups = stream.counted / max(stream.steps - stream.steps // 2, 1)
    costs = {device: step_cost(policy.scores[0], device) for device in DEVICES}
    simple = policy.admission is None
    return {
        "policy": UNLIMITED if combination.policy is None else combination.policy.name,
        "capacity": combination.ids,
        "rows_of_columns": combination.rows,
        "share_of_ids": combination.ids / stream.distinct if stream.distinct else 0.0,
        "hit_rate": max(0.0, 1 - misses),
        "hit_rate_error": spread(used.misses, column_rates) / counted,
        "rows": round(scaled(used.rows)),
        "evictions_an_id": evicted / stream.distinct if stream.distinct else 0.0,
        "memory": size.memory,
        "step_ms": {
            device: None
            if cost is None or not simple
            else cost.step_ms(lookups, evicted / stream.steps)
            for device, cost in costs.items()
        },
        "step_ms_of": {
            device: None if cost is None else cost.machine for device, cost in costs.items()
        },
        "auc": None if auc is None else auc.auc,
        "auc_below_unlimited": None
        if auc is None or unlimited is None
        else unlimited.auc - auc.auc,
        "auc_error": None
        if auc is None or unlimited is None
        else error_of_difference(auc, unlimited),
        "code": f"td.{policy!r}".replace("admission=", "admission=td."),
    }


def _suggestion(runs: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the run of the least memory with the AUC of unlimited tables; None: there is none."""
    good = [
        (run["memory"], number)
        for number, run in enumerate(runs)
        if number > 0 and run["auc"] is not None and run["auc_below_unlimited"] <= AUC_MARGIN
    ]
    return min(good)[1] if good else None


__all__ = ["AUC_MARGIN", "TRAINED", "UNLIMITED", "ReplayWishes", "replayed"]
