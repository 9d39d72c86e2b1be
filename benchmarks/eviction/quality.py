"""Ids that eviction and admission choose, against exact simulations; small tables also timed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
from common.command import is_selected
from common.id_streams import DriftingZipfNumbers, ZipfNumbers, distinct_ids, spread
from common.progress import progress
from common.report import Row, quantity
from common.timing import elapsed_ms
from eviction.reference import ExactCache, FillCurve, one_bucket_curve
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.policy.admission import AdmissionRule

SCORES = {"LRU": "step", "LFU": "frequency"}
BATCHES = 2000  # of a stream for hit rates
LIMIT_SHARE = 0.5  # ids that can occur, by lookups
DRIFT = 0.1  # ranks a batch
CAPACITIES = (0.01, 0.1, 0.3)  # of the distinct ids of a stream
HIT_TARGET = 2.0  # points
BUCKET_SLOTS = 128
CURVE_PARTS, CURVE_INSERTS = 300, 3  # points; inserts by capacity
SMALL_CAPACITIES = (1, 2, 4, 16, 44, 64, 89, 179, 1024)
WHOLE_INDEX_IDS = 89  # of the largest table with an index that is looked at as a whole
THRESHOLD = 8  # occurrences
SKETCH_BYTES = (1, 2, 4, 8, 16, 32)  # by distinct ids
BOUND_SHARE = 100 * math.exp(-4)  # % of the ids with a count that may exceed the bound


def _single(policy: td.Policy) -> td.TableGroup:
    return td.TableGroup([td.TableConfig("bench", 1, policy=policy)], optimizer=None, seed=0)


# -- hit rates ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """Batches of numbers below ``limit`` with a popularity that drifts."""

    batches: list[Tensor]
    limit: int
    distinct: int


def drifting_stream(lookups: int) -> Stream:
    """Return a stream of :data:`BATCHES` batches with ``lookups`` numbers altogether."""
    limit = int(lookups * LIMIT_SHARE)
    numbers = DriftingZipfNumbers(limit, seed=0, drift=DRIFT)
    batches = [numbers.draw(-(-lookups // BATCHES)) for _ in range(BATCHES)]
    return Stream(batches, limit, len(torch.unique(torch.cat(batches))))


def hit_rates(stream: Stream, score: str, capacity: int) -> tuple[float, float, int]:
    """Return the share of lookups that find their id, in the second half of a stream.

    Args:
        stream: the stream.
        score: a key of :data:`SCORES`.
        capacity: ids that the tables may hold.

    Returns:
        The share in our table, that of the exact simulation, and how many new ids of the whole
        stream found no place in ours.
    """
    ids = spread(torch.arange(stream.limit))
    ours = _single(td.Policy(score=SCORES[score], capacity=capacity))
    exact = ExactCache(ids.numpy(), capacity, score=SCORES[score])
    half = len(stream.batches) // 2
    before, exact_hits = ours.usage.tables()["bench"], 0
    batches = progress(stream.batches, f"{score}, {capacity} ids", depth=1)
    for number, batch in enumerate(batches):
        if number == half:
            before, exact_hits = ours.usage.tables()["bench"], 0
        ours.insert(0, ids[batch])
        ours.step()
        exact_hits += exact.look_up(batch.numpy())
    after = ours.usage.tables()["bench"]
    lookups = sum(len(batch) for batch in stream.batches[half:])
    return (after.found - before.found) / lookups, exact_hits / lookups, after.rejected


def hit_rate_rows(bench: str, lookups: int, only: list[str]) -> Iterator[Row | str]:
    """Yield the points by which hit rates fall short of exact LRU and LFU."""
    cases = {
        (score, share): f"hit rate below exact {score}, capacity {100 * share:g} % of the ids"
        for score in SCORES
        for share in CAPACITIES
    }
    if not any(is_selected(only, case, "target") for case in cases.values()):
        return
    stream = drifting_stream(lookups)
    for (score, share), case in cases.items():
        if not is_selected(only, case, "target"):
            continue
        yield case
        capacity = max(int(stream.distinct * share), 1)
        ours, exact, rejected = hit_rates(stream, score, capacity)
        yield quantity(
            bench,
            case,
            100 * (exact - ours),
            "points",
            target=HIT_TARGET,
            hit_rate=100 * ours,
            exact_hit_rate=100 * exact,
            rejected=rejected,
            distinct_ids=stream.distinct,
            capacity=capacity,
            batch=len(stream.batches[0]),
        )


# -- the first eviction ------------------------------------------------------------------------


def our_curve(capacity: int) -> FillCurve:
    """Insert random new ids into our table; the first ids of a batch take the rows left."""
    group = _single(td.Policy(score="step", capacity=capacity))
    used, evicting = [0.0], [0.0]
    part = max(CURVE_INSERTS * capacity // CURVE_PARTS, 1)
    for number in range(CURVE_PARTS):
        before = group.usage.tables()["bench"]
        group.insert(0, distinct_ids(number * part, part))
        group.step()
        after = group.usage.tables()["bench"]
        lost = after.evicted + after.rejected - before.evicted - before.rejected
        used.append(after.size / capacity)
        evicting.append(lost / part)
    return FillCurve(used, evicting, used[next(i for i, e in enumerate(evicting) if e > 0)])


def first_eviction_rows(bench: str, capacity: int, only: list[str]) -> Iterator[Row | str]:
    """Yield rows that are unused at the first eviction, with the curves of report.py's plot."""
    one_bucket = f"one bucket of {BUCKET_SLOTS} slots"
    case = "rows unused at the first eviction"
    if not is_selected(only, case, "target"):
        return
    yield case
    ours = our_curve(capacity)
    simulated = one_bucket_curve(
        capacity, BUCKET_SLOTS, CURVE_INSERTS * capacity, parts=CURVE_PARTS, seed=0
    )
    for name, curve, target in ((case, ours, 0.0), (f"{case}, {one_bucket}", simulated, None)):
        yield quantity(
            bench,
            name,
            100 * (1 - curve.used_at_first),
            "%",
            target=target,
            capacity=capacity,
            evicting_at_90_percent=_evicting_at(curve, 0.90),
            evicting_at_99_percent=_evicting_at(curve, 0.99),
            used=[round(share, 4) for share in curve.used],
            evicting=[round(share, 4) for share in curve.evicting],
        )


def _evicting_at(curve: FillCurve, share: float) -> float:
    """Share of the inserts that evict at the last point where at most ``share`` is in use."""
    return max(e for u, e in zip(curve.used, curve.evicting, strict=True) if u <= share)


# -- small tables ------------------------------------------------------------------------------


def small_table_rows(bench: str, steps: int, only: list[str]) -> Iterator[Row | str]:
    """Yield the share of new ids that a full table refuses needlessly, by its capacity."""
    for capacity in SMALL_CAPACITIES:
        case = f"new ids refused by a full table of {capacity}"
        if not is_selected(only, case, "target"):
            continue
        yield case
        shares, times_ms = {}, []
        for what, count in (("one", 1), ("half", max(capacity // 2, 1)), ("all", capacity)):
            group = _single(td.Policy(capacity=capacity))
            ids = distinct_ids(0, capacity + steps * count)
            group.insert(0, ids[:capacity])
            for batch in ids[capacity:].split(count):
                group.step()
                times_ms.append(elapsed_ms(functools.partial(group.insert, 0, batch)))
            refused = group.usage.tables(wait=True)["bench"].rejected
            shares[what] = 100 * refused / (steps * count)
        yield quantity(
            bench,
            case,
            shares["all"],
            "%",
            target=0.0 if capacity <= WHOLE_INDEX_IDS else None,
            one_of_its_ids=shares["one"],
            half_of_its_ids=shares["half"],
            us_a_new_id=1e3 * median(times_ms[-steps:]) / capacity,  # where all are replaced
        )


# -- admission ---------------------------------------------------------------------------------


def admission_rows(bench: str, lookups: int, only: list[str]) -> Iterator[Row | str]:
    """Yield rare ids that were admitted, by what counts occurrences and how much memory it has."""
    prefix = f"ids admitted before {THRESHOLD} occurrences"
    cases = {None: f"{prefix}, exact counts"}
    cases |= {size: f"{prefix}, sketch of {size} bytes an id" for size in SKETCH_BYTES}
    wanted = {size: case for size, case in cases.items() if is_selected(only, case, "target")}
    if not wanted:
        return
    draws = ZipfNumbers(int(lookups * LIMIT_SHARE), seed=0).draw(lookups)
    ids, counts = torch.unique(spread(draws), return_counts=True)
    for size, case in wanted.items():
        yield case
        rule: AdmissionRule = td.AdmitFrequent(THRESHOLD)
        if size is not None:
            rule = td.AdmitFrequentSketch(THRESHOLD, memory=size * len(ids))
        group = _single(td.Policy(admission=rule))
        for batch in spread(draws).split(-(-lookups // BATCHES)):
            group.insert(0, batch)
            group.step()
        admitted = group.contains(0, ids)
        stats = group.usage.tables()["bench"]
        rare = counts < THRESHOLD
        extra: dict[str, float | int] = {
            "counter_bytes": stats.counter_bytes,
            "counter_bytes_an_id": stats.counter_bytes / len(ids),
            "distinct_ids": len(ids),
            "percent_of_the_admitted": 100 * float((admitted & rare).sum() / admitted.sum()),
            "frequent_ids_refused": int((~admitted & ~rare).sum()),
        }
        target: float | None = 0.0
        if isinstance(rule, td.AdmitFrequentSketch):
            target = None
            # occurrences counted, at most: those of the ids without a row
            counted = int(counts.clamp(max=THRESHOLD).sum())
            bound = math.e / rule.width * counted
            certain = counts + bound < THRESHOLD
            extra |= {"error_bound": bound, "ids_that_bound_keeps_out": int(certain.sum())}
            if bool(certain.any()):
                share = 100 * float((admitted & certain).sum() / certain.sum())
                extra |= {"admitted_beyond_bound_percent": share, "limit_percent": BOUND_SHARE}
        yield quantity(
            bench,
            case,
            100 * float((admitted & rare).sum() / rare.sum()),
            "%",
            target=target,
            **extra,
        )
