"""Adam steps of tables in host memory with a cache in HBM, beside the same tables in HBM."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.common.id_streams import ZipfNumbers, spread
from benchmarks.common.report import Row, compare
from benchmarks.common.timing import Timing
from benchmarks.gpu import limits
from benchmarks.gpu.limits import Shape
from benchmarks.gpu.stages.candidates import Candidates, Settings, check_device, random_gradient
from benchmarks.gpu.workload import Batch, Ours, generator_of, power_law_batch, unique_count
from torch_dynemb import HostStore

UNIQUE = 0.33  # distinct ids of a batch, as a share of its ids
HOT = 0.4  # rows of a table that hits are drawn from
MISSES = 0.2  # distinct rows of a batch without a slot, in the case of 80 % hits


class Case(NamedTuple):
    """A cache that is timed.

    Attributes:
        name: of the case.
        slots: of the cache, as a share of the rows.
        misses: distinct rows of a batch without a slot, as a share; None: those of a power law.
        prefetched: whether rows come one batch ahead.
        published: milliseconds of DynamicEmb and of FBGEMM on one H100, if they are published.
    """

    name: str
    slots: float
    misses: float | None
    prefetched: bool
    published: tuple[float, float] | None


CASES = (
    Case("all hits", 1.0, 0.0, False, None),
    Case("80 % hits", HOT, MISSES, False, (24.3, 15.0)),
    Case("80 % hits, prefetched", HOT, MISSES, True, None),
    Case("10 % of the rows in HBM", 0.1, None, False, None),
)


def batches_with_misses(
    settings: Settings, tables: int, ids: int, rows: int, misses: float
) -> list[Batch]:
    """Return batches that draw most rows from the hot ones, and others that no other batch has.

    Args:
        settings: sizes, and the device.
        tables, ids, rows: of each batch, of each table.
        misses: share of the distinct rows that are not hot.
    """
    device = settings.device
    unique, hot = int(UNIQUE * ids), int(HOT * rows)
    cold = int(misses * unique)
    offsets = torch.arange(tables + 1, device=device) * ids
    batches = []
    for number in range(settings.batches):
        generator = generator_of(device, number)
        parts = []
        for table in range(tables):
            known = torch.randperm(hot, generator=generator, device=device)[: unique - cold]
            other = hot + number * cold + torch.arange(cold, device=device)
            chosen = torch.cat([known, other]) % rows
            again = torch.randint(
                len(chosen), (ids - len(chosen),), generator=generator, device=device
            )
            numbers = torch.cat([chosen, chosen[again]])
            mixed = torch.randperm(ids, generator=generator, device=device)
            parts.append(numbers[mixed] + table * rows)
        numbers = torch.cat(parts)
        batches.append(Batch(numbers, spread(numbers % rows), offsets))
    return batches


def measure_tiers(settings: Settings) -> Iterator[Row]:
    """Yield the published case with several caches, each against its estimate."""
    for misses in dict.fromkeys(case.misses for case in CASES):
        cases = [case for case in CASES if case.misses == misses]
        yield from _measure(settings, misses, cases)


def _measure(settings: Settings, misses: float | None, cases: Sequence[Case]) -> Iterator[Row]:
    tables, dim, device = settings.published_tables, 128, settings.device
    rows, ids = settings.published_rows, settings.published_ids // settings.published_tables
    if misses is None:
        law = ZipfNumbers(rows, seed=11, device=device)
        batches = [power_law_batch(law, tables, ids, rows) for _ in range(settings.batches)]
    else:
        batches = batches_with_misses(settings, tables, ids, rows, misses)
    shape = Shape(ids=ids * tables, unique=unique_count(batches), bags=None, dim=dim)
    grad = random_gradient(shape.ids, dim, device)
    in_hbm = "all rows in HBM"
    candidates = Candidates(settings, batches)
    trained: dict[str, Ours] = {}
    for name, slots in ((in_hbm, None), *((case.name, case.slots) for case in cases)):
        storage = None
        if slots is not None:
            # and one batch of rows without a later use
            spare = int(MISSES * shape.unique)
            storage = HostStore(cache=f"{int(slots * tables * rows) + spare} rows")
        ours = trained[name] = Ours(
            "Adam",
            tables=tables,
            rows=rows,
            dim=dim,
            spare=shape.ids,
            bags=False,
            device=device,
            storage=storage,
        )
        ahead = any(case.prefetched for case in cases if case.name == name)
        run = functools.partial(_step, ours, grad, batches, ahead)
        candidates.eager(f"{name}, eager", functools.partial(_whole_step, ours, run))
        if not ahead:  # a prefetch in a graph would be one of the batch that it was captured with
            candidates.replayed(name, run, ours.group.step, each=True)
    before = {name: _counts(trained[name]) for name in trained}
    timings = candidates.time()
    check_device(settings)
    for case in cases:
        yield from _rows_of(case, shape, timings, before[case.name], trained[case.name], in_hbm)
    yield from candidates.launched("tiers")


def _step(
    ours: Ours, grad: Tensor, batches: Sequence[Batch], ahead: bool, number: int, batch: Batch
) -> None:
    output = ours.forward(batch)
    if ahead:
        ours.prefetch(batches[(number + 1) % len(batches)])
    output.backward(grad)


def _whole_step(ours: Ours, run: functools.partial[None], number: int, batch: Batch) -> None:
    run(number, batch)
    ours.group.step()


def _counts(ours: Ours) -> dict[str, float]:
    """Return the counters of a cache; empty on the CPU, where all rows are in memory."""
    stats = ours.group.usage.storage()
    return {} if stats is None else stats.as_dict()


def _rows_of(
    case: Case,
    shape: Shape,
    timings: dict[str, Timing],
    before: dict[str, float],
    ours: Ours,
    in_hbm: str,
) -> Iterator[Row]:
    """Yield the rows of a case: beside rows in HBM, and beside what is published."""
    moved = {name: value - before[name] for name, value in _counts(ours).items()}
    lookups = moved.get("hits", 0) + moved.get("misses", 0) + moved.get("in_place", 0)
    calls = lookups / shape.ids
    read, written, missed = (
        moved.get(name, 0) / max(calls, 1) for name in ("bytes_read", "bytes_written", "misses")
    )
    link_ms = max(read, written) / limits.ASSUMED_HOST_LINK_GB_PER_S / 1e6
    plan_ms = limits.ASSUMED_H200.ms(limits.stage(shape, round(missed)))
    what = f"{len(ours.group.config.tables)} tables, D={shape.dim}"
    for timed in (case.name, f"{case.name}, eager"):
        if timed not in timings:
            continue
        timing, plain = timings[timed], timings[timed.replace(case.name, in_hbm)]
        limit = plain.median_ms + plan_ms + (0 if case.prefetched else link_ms)
        yield compare(
            "gpu_tiers",
            f"Adam step, {timed}, {what}",
            timing,
            in_hbm,
            plain,
            unique=shape.unique,
            missed=missed,
            bytes_read=read,
            bytes_written=written,
            host_link_ms=link_ms,
            estimate_ms=limit,
        )
    if case.published is not None:
        theirs, fbgemm = case.published
        yield compare(
            "gpu_tiers",
            f"Adam step, {case.name}, {what}",
            timings[case.name],
            "FBGEMM's UVM caching, published for an H100",
            Timing((fbgemm,)),
            dynamicemb_ms=theirs,
            published=True,
        )
