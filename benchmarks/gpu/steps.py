"""Lookups and training steps on a GPU: against their own limits, static tables and graph replay.

Stages: ``host`` counts what the host waits for in a training step and compares replay with eager;
``published`` is the case that DynamicEmb publishes; ``dims`` times every op at several widths and
shares of distinct ids.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_dynemb as td
from benchmarks.gpu import limits
from benchmarks.gpu.experiments import read_ceilings
from benchmarks.gpu.launches import recorded_launches
from benchmarks.gpu.limits import Ceilings, Shape, Work
from benchmarks.gpu.measure import (
    Candidate,
    Row,
    RowFile,
    Timing,
    compare,
    interleave,
    progress,
    quantity,
)
from benchmarks.gpu.workload import (
    OPTIMIZERS,
    Batch,
    Ours,
    PowerLaw,
    Static,
    bag_batch,
    capture,
    generator_of,
    power_law_batch,
    unique_count,
)
from benchmarks.id_streams import spread
from torch_dynemb import ops

ADAM_AGAINST_ROWWISE = 1.8  # largest ratio wanted
STATIC_BAG, STATIC = "nn.EmbeddingBag(sparse)", "nn.Embedding(sparse)"
PEER_OPTIMIZERS = {"SGD": "SGD", "Adam": "SparseAdam"}
# The host waits in these; a training step should make none of the calls.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
# Published for one H100, in ms, by DynamicEmb: itself, and FBGEMM's static TBE.
PUBLISHED = {"Adam step": (2.185, 1.352), "SGD step": (1.923, 0.959), "lookup": (0.645, 0.457)}


@dataclass(frozen=True)
class Settings:
    """Sizes and how to measure.

    Attributes:
        ids: N, ids of a batch.
        bag: ids of a bag.
        rows: ids of a table, if they fit into ``bytes``.
        bytes: memory for all tables of a width.
        batches: different batches, used in turn: their rows must exceed the cache.
        peer_calls: batches that a peer takes a round.
    """

    device: torch.device
    ceilings: Ceilings | None
    rounds: int
    dims: tuple[int, ...]
    shares: tuple[float, ...]
    ids: int
    bag: int
    rows: int
    bytes: int
    batches: int
    peer_calls: int
    published_tables: int
    published_ids: int
    published_rows: int
    launches: bool

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


def fraction_target(dim: int) -> float:
    """The part of an op's own limit that is wanted."""
    return 0.7 if dim >= 64 else 0.6


def against_limit(
    settings: Settings, parts: list[Work], timing: Timing, shape: Shape
) -> dict[str, Any]:
    """Keys of a row: sizes, rate, what the op needs and how close it came."""
    work = limits.total(parts)
    result: dict[str, Any] = {
        "dim": shape.dim,
        "ids": shape.ids,
        "unique": shape.unique,
        "g_ids_per_s": shape.ids / timing.median_ms / 1e6,
        "bytes": work.bytes,
        "accesses": work.accesses,
        "l2_bytes": work.l2_bytes,
    }
    if settings.ceilings is not None:
        limit = limits.limit_ms(parts, settings.ceilings)
        fraction = limit / timing.median_ms
        result |= {
            "limit_ms": limit,
            "limited_by": settings.ceilings.limited_by(work),
            "ceilings": "measured" if settings.ceilings.measured else "assumed",
            "fraction": fraction,
            "fraction_target": fraction_target(shape.dim),
            "fraction_met": fraction >= fraction_target(shape.dim),
        }
    return result


def check_device(settings: Settings) -> None:
    """Raises what kernels have reported."""
    if settings.cuda:
        torch.cuda.synchronize()
        ops.raise_device_errors(torch.cuda.current_device())


def release() -> None:
    """Gives the memory of tables that are gone back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def over(batches: list[Batch], run: Callable[[int, Batch], object]) -> Callable[[], None]:
    """A function that runs all batches, with their numbers."""

    def run_all() -> None:
        for number, batch in enumerate(batches):
            run(number, batch)

    return run_all


class Candidates:
    """What is timed together: each op eagerly, and on a GPU by replay of a graph for each batch."""

    def __init__(self, settings: Settings, batches: list[Batch]) -> None:
        self._settings = settings
        self._batches = batches
        self.all: dict[str, Candidate] = {}

    def eager(self, name: str, run: Callable[[int, Batch], object]) -> None:
        """A candidate that takes all batches."""
        self.all[name] = Candidate(over(self._batches, run), len(self._batches))

    def replayed(
        self,
        name: str,
        run: Callable[[int, Batch], object],
        end: Callable[[], object] | None = None,
    ) -> None:
        """A candidate that replays graphs; ``end`` is called when all batches are done.

        One graph for all of them would make the library keep room for nine times as many ids.
        """
        if not self._settings.cuda:
            self.eager(name, run)
            return
        pool = torch.cuda.graph_pool_handle()
        graphs = [
            capture(functools.partial(run, number, batch), pool)
            for number, batch in enumerate(self._batches)
        ]

        def replay() -> None:
            for graph in graphs:
                graph.replay()
            if end is not None:
                end()

        self.all[name] = Candidate(replay, len(self._batches))

    def both(
        self,
        name: str,
        run: Callable[[int, Batch], object],
        end: Callable[[], object] | None = None,
    ) -> None:
        """A candidate that is replayed, and one that takes the same batches eagerly."""
        self.eager(f"{name}, eager", run)
        self.replayed(name, run, end)

    def peer(self, name: str, run: Callable[[int, Batch], object]) -> None:
        """A peer, which may be much slower: it takes the first batches only."""
        batches = self._batches[: self._settings.peer_calls]
        self.all[name] = Candidate(over(batches, run), len(batches))

    def time(self) -> dict[str, Timing]:
        """Timings of one call."""
        return interleave(self.all, self._settings.device, rounds=self._settings.rounds)

    def launched(self, stage: str) -> Iterator[Row]:
        """With --launches, a row that names our kernels in all that was timed."""
        if not self._settings.launches:
            return
        with recorded_launches() as kernels:
            for candidate in self.all.values():
                candidate.run()
        row: Row = {"bench": "gpu_kernels", "case": stage, "ours_ms": None, "valid": True}
        yield row | {"kernels": sorted(kernels)}


def random_gradient(rows: int, dim: int, device: torch.device) -> Tensor:
    """A gradient small enough that weights stay finite."""
    return torch.randn(rows, dim, generator=generator_of(device, 3), device=device) * 1e-3


# -- every width --------------------------------------------------------------------------------


def rows_that_fit(settings: Settings, dim: int) -> int:
    """Ids of each table, so that three of ours and a static one with Adam's state fit."""
    bytes_per_id = 32 * dim + 110
    available = settings.bytes
    if settings.cuda:
        available = min(available, torch.cuda.mem_get_info()[0] * 6 // 10)
    return max(min(settings.rows, available // bytes_per_id), settings.ids)


def measure_dim(settings: Settings, dim: int) -> Iterator[Row]:
    """Rows of one width."""
    rows = rows_that_fit(settings, dim)
    tables = {
        name: Ours(
            name,
            tables=1,
            rows=rows,
            dim=dim,
            spare=settings.ids,
            bags=True,
            reserved=True,
            device=settings.device,
        )
        for name in OPTIMIZERS
    }
    static = Static(rows, dim, bags=True, device=settings.device)
    for share in settings.shares:
        yield from measure_share(settings, dim, rows, share, tables, static)
        check_device(settings)


def measure_share(
    settings: Settings,
    dim: int,
    rows: int,
    share: float,
    tables: dict[str, Ours],
    static: Static,
) -> Iterator[Row]:
    """Rows of one width and share of distinct ids."""
    generator = generator_of(settings.device, 7)
    unique = max(round(settings.ids * share), 1)
    batches = [
        bag_batch(rows, settings.ids, unique, settings.bag, generator)
        for _ in range(settings.batches)
    ]
    bags = settings.ids // settings.bag
    shape = Shape(ids=settings.ids, unique=unique, bags=bags, dim=dim)
    grad = random_gradient(bags, dim, settings.device)
    reader = tables["SGD"]
    handles = {name: [ours.find(batch) for batch in batches] for name, ours in tables.items()}
    missing = sum(int((found < 0).sum()) for found in handles["SGD"])
    if missing:
        raise RuntimeError(f"{missing} ids of the batches are not in the table that was filled")

    candidates = Candidates(settings, batches)
    candidates.replayed("find", lambda _, batch: reader.find(batch))
    candidates.replayed("find_or_insert_", lambda _, batch: reader.find_or_insert(batch))
    candidates.replayed(
        "embedding_bag_inference", lambda n, batch: reader.read(batch, handles["SGD"][n])
    )
    candidates.replayed("lookup", lambda _, batch: reader.lookup(batch))
    candidates.eager("lookup, eager", lambda _, batch: reader.lookup(batch))
    candidates.peer(STATIC_BAG, lambda _, batch: static.lookup(batch))
    for name, ours in tables.items():

        def backward(n: int, batch: Batch, name: str = name, ours: Ours = ours) -> None:
            ours.backward(batch, handles[name][n], grad)

        def step(n: int, batch: Batch, ours: Ours = ours) -> None:
            ours.step(batch, grad)

        candidates.eager(f"{name} step, eager", step)
        candidates.replayed(f"{name} backward", backward)
        candidates.replayed(f"{name} step", step, ours.group.end_step)
    for name in PEER_OPTIMIZERS:

        def peer_step(n: int, batch: Batch, name: str = name) -> None:
            static.step(batch, grad, name)

        candidates.peer(f"{STATIC_BAG} {name}", peer_step)

    timings = candidates.time()
    parts = {
        "find": [limits.find(shape)],
        "find_or_insert_": [limits.find_or_insert(shape)],
        "embedding_bag_inference": [limits.lookup_rows(shape)],
        "lookup": limits.lookup_parts(shape),
    }
    for name in tables:
        parts[f"{name} backward"] = [limits.backward(shape, name)]
        parts[f"{name} step"] = limits.step_parts(shape, name)
    suffix = f"D={dim} U/N={share:g}"

    def row(
        bench: str, op: str, peer: str | None, *, timed: str | None = None, **extra: Any
    ) -> Row:
        timing = timings[timed or op]
        return compare(
            bench,
            f"{timed or op} {suffix}",
            timing,
            extra.pop("peer_label", peer),
            None if peer is None else timings[peer],
            op=op,
            share=share,
            table_rows=rows,
            **extra,
            **against_limit(settings, parts[op], timing, shape),
        )

    for op in ("find", "find_or_insert_", "embedding_bag_inference"):
        yield row("gpu_ops", op, None)
    yield row("gpu_lookup", "lookup", STATIC_BAG)
    yield row("gpu_lookup", "lookup", STATIC_BAG, timed="lookup, eager")
    sort = limits.gradient_sort(shape, rows + settings.ids)
    for name in tables:
        peer = f"{STATIC_BAG} {name}" if name in PEER_OPTIMIZERS else None
        label = f"{STATIC_BAG} {PEER_OPTIMIZERS[name]}" if peer else None
        yield row("gpu_ops", f"{name} backward", None, sort_bytes=sort.bytes)
        yield row("gpu_train_step", f"{name} step", peer, peer_label=label)
        yield row(
            "gpu_train_step", f"{name} step", peer, peer_label=label, timed=f"{name} step, eager"
        )
        if settings.cuda:
            yield compare(
                "gpu_graph",
                f"{name} step, replay {suffix}",
                timings[f"{name} step"],
                "our eager step",
                timings[f"{name} step, eager"],
            )
    yield compare(
        "gpu_train_step",
        f"Adam step {suffix}",
        timings["Adam step"],
        "our RowWiseAdagrad step",
        timings["RowWiseAdagrad step"],
        target=ADAM_AGAINST_ROWWISE,
    )
    yield from candidates.launched("dims")


# -- the published case -------------------------------------------------------------------------


def measure_published(settings: Settings) -> Iterator[Row]:
    """Ten tables, D=128, power law 1.05, a vector per id: DynamicEmb's own benchmark.

    The tables are reserved, so that no growth is in the times.
    """
    tables, dim, device = settings.published_tables, 128, settings.device
    rows, ids = settings.published_rows, settings.published_ids // settings.published_tables
    law = PowerLaw(rows, generator_of(device, 11))
    batches = [power_law_batch(law, tables, ids, rows) for _ in range(settings.batches)]
    shape = Shape(ids=ids * tables, unique=unique_count(batches), bags=None, dim=dim)
    grad = random_gradient(shape.ids, dim, device)
    static = Static(tables * rows, dim, bags=False, device=device)
    candidates = Candidates(settings, batches)
    candidates.peer(STATIC, lambda _, batch: static.lookup(batch))
    for name in PEER_OPTIMIZERS:
        ours = Ours(
            name,
            tables=tables,
            rows=rows,
            dim=dim,
            spare=shape.ids,
            bags=False,
            reserved=True,
            device=device,
        )
        handles = [ours.find(batch) for batch in batches]
        if name == "SGD":

            def lookup(n: int, batch: Batch, ours: Ours = ours) -> None:
                ours.lookup(batch)

            candidates.both("lookup", lookup)

        def forward(n: int, batch: Batch, ours: Ours = ours) -> None:
            ours.forward(batch)

        def backward(
            n: int, batch: Batch, ours: Ours = ours, handles: list[Tensor] = handles
        ) -> None:
            ours.backward(batch, handles[n], grad)

        def step(n: int, batch: Batch, ours: Ours = ours) -> None:
            ours.step(batch, grad)

        def peer_step(n: int, batch: Batch, name: str = name) -> None:
            static.step(batch, grad, name)

        candidates.both(f"{name} forward", forward, ours.group.end_step)
        candidates.both(f"{name} backward", backward)
        candidates.both(f"{name} step", step, ours.group.end_step)
        candidates.peer(f"{STATIC} {name}", peer_step)
    timings = candidates.time()
    check_device(settings)
    parts = {"lookup": limits.lookup_parts(shape)}
    for name in PEER_OPTIMIZERS:
        parts[f"{name} step"] = limits.step_parts(shape, name)
        parts[f"{name} forward"] = limits.step_parts(shape, name)[:2]
        parts[f"{name} backward"] = [limits.backward(shape, name)]
    for op, works in parts.items():
        for timed in (op, f"{op}, eager"):
            timing = timings[timed]
            case = f"{timed}, {tables} tables, D={dim}, power law 1.05"
            extra = against_limit(settings, works, timing, shape) | {"op": op, "tables": tables}
            peer, label = None, None
            if op == "lookup":
                peer, label = timings[STATIC], STATIC
            elif op.endswith("step"):
                name = op.removesuffix(" step")
                peer, label = timings[f"{STATIC} {name}"], f"{STATIC} {PEER_OPTIMIZERS[name]}"
            yield compare("gpu_published", case, timing, label, peer, **extra)
            if op in PUBLISHED:
                theirs, tbe = PUBLISHED[op]
                yield compare(
                    "gpu_published",
                    case,
                    timing,
                    "static TBE, published for an H100",
                    Timing((tbe,)),
                    target=1.0 if op == "Adam step" else None,
                    dynamicemb_ms=theirs,
                    published=True,
                )
    yield from candidates.launched("published")


# -- host ---------------------------------------------------------------------------------------


def waits_of(run: Callable[[], object]) -> dict[str, int]:
    """What the host waits for while it runs something: calls by name, and copies to the host."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        torch.cuda.synchronize()
        with record_function("measured"):
            run()
        torch.cuda.synchronize()
    events = list(profiler.events())
    spans = [
        event.time_range
        for event in events
        if event.name == "measured" and event.device_type == DeviceType.CPU
    ]
    if len(spans) != 1:
        raise RuntimeError(f"the profiler has {len(spans)} events named 'measured', expected one")
    counts = dict.fromkeys((*WAITS, "copies to the host", "launches"), 0)
    for event in events:
        inside = spans[0].start <= event.time_range.start <= spans[0].end
        if event.name in WAITS and inside:
            counts[event.name] += 1
        if event.name.startswith(LAUNCHES) and inside:
            counts["launches"] += 1
        if "Memcpy DtoH" in event.name:
            counts["copies to the host"] += 1
    if counts["launches"] == 0:
        raise RuntimeError("the profiler saw no launch, so it would have seen no wait either")
    return counts


def measure_host(settings: Settings) -> Iterator[Row]:
    """Waits of the host in training steps of a module, and what replay changes."""
    if not settings.cuda:
        return
    count, bag, dim, steps = 1 << 16, 16, 64, 20
    generator = generator_of(settings.device, 5)
    for graphed in (False, True):
        module = td.DynamicEmbeddingBagCollection(
            [td.TableConfig("table", dim)],
            optimizer=td.Adam(lr=0.01),
            max_rows=1 << 20,
            device=settings.device,
        )
        ids = torch.randint(1 << 18, (count // bag, bag), generator=generator, device="cuda")
        grad = random_gradient(count // bag, dim, settings.device)

        def eager(module: Any = module, ids: Tensor = ids, grad: Tensor = grad) -> None:
            module({"table": ids}).backward(grad)

        run: Callable[[], object] = eager
        for _ in range(3):
            eager()
            module.optimizer.step()
        if graphed:
            run = capture(eager).replay
        for _ in range(3):
            run()
            module.optimizer.step()
        torch.cuda.synchronize()

        def training(run: Callable[[], object] = run, module: Any = module) -> None:
            for _ in range(steps):
                run()
                module.optimizer.step()

        kind = "replayed" if graphed else "eager"
        counts = waits_of(training)
        for name, value in counts.items():
            # a replayed step may wait for the one eight steps before, so that memory keeps ahead
            free = name == "launches" or (graphed and name == "cudaEventSynchronize")
            yield quantity(
                "gpu_host",
                f"{name} in {steps} {kind} training steps",
                value,
                "calls",
                target=None if free else 0,
            )
        check_device(settings)
    yield from replay_differences(settings)


def replay_differences(settings: Settings) -> Iterator[Row]:
    """Rows that differ after the same steps, eager and replayed."""
    generator = generator_of(settings.device, 6)
    batches = [bag_batch(4096, 1 << 14, 3000, 16, generator) for _ in range(2)]
    grad = random_gradient((1 << 14) // 16, 32, settings.device)
    for name in OPTIMIZERS:
        results = []
        for graphed in (False, True):
            ours = Ours(
                name,
                tables=1,
                rows=4096,
                dim=32,
                spare=4096,
                bags=True,
                reserved=True,
                device=settings.device,
            )

            def run(ours: Ours = ours) -> None:
                for batch in batches:
                    ours.step(batch, grad)

            if graphed:
                graph = capture(run)  # runs once before
                for _ in range(4):
                    graph.replay()
                    ours.group.end_step()
            else:
                for _ in range(5):
                    run()
            ids = spread(torch.arange(4096, device=settings.device))
            results.append(ours.group.read(0, ids))
        different = int((results[0] != results[1]).any(dim=1).sum())
        yield quantity(
            "gpu_graph", f"{name}: rows that replay changes otherwise", different, "rows", target=0
        )


# -- command line -------------------------------------------------------------------------------

STAGES = ("host", "published", "dims")


def run_stages(settings: Settings, stages: list[str], rows: RowFile) -> bool:
    """Runs stages; one that fails leaves a row with the reason and does not stop the others."""
    work: list[tuple[str, Callable[[], Iterator[Row]]]] = []
    if "host" in stages:
        work.append(("host", lambda: measure_host(settings)))
    if "published" in stages:
        work.append(("published", lambda: measure_published(settings)))
    if "dims" in stages:
        for dim in settings.dims:
            work.append((f"D={dim}", functools.partial(measure_dim, settings, dim)))
    complete = True
    for name, measure in progress(work, "stages"):
        try:
            for row in measure():
                rows.add(row)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            complete = False
            reason = f"{type(error).__name__}: {error}"
            rows.add(
                {
                    "bench": "gpu_failed",
                    "case": name,
                    "ours_ms": None,
                    "peer": None,
                    "peer_ms": None,
                    "ratio": None,
                    "valid": False,
                    "reason": reason[:1000],
                }
            )
        release()
    return complete


def settings_of(options: argparse.Namespace) -> Settings:
    """Sizes by the command line."""
    quick = options.quick
    return Settings(
        device=torch.device(options.device),
        ceilings=limits.ASSUMED_H200
        if options.assume_ceilings
        else read_ceilings(options.ceilings),
        rounds=options.rounds,
        # those with targets first, should time run out
        dims=tuple(options.dims or ((8, 64) if quick else (128, 64, 256, 32, 8))),
        shares=(0.33,) if quick else (1.0, 0.33, 0.1),
        ids=1 << 12 if quick else 1 << 20,
        bag=16,
        rows=1 << 14 if quick else 1 << 24,
        bytes=64_000_000_000,
        batches=2 if quick else 8,
        peer_calls=1 if quick else 2,
        published_tables=10,
        published_ids=1000 if quick else 1_048_570,
        published_rows=1000 if quick else 1_000_000,
        launches=options.launches,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a check")
    arguments.add_argument("--quick", action="store_true", help="smaller sizes: a check, no result")
    arguments.add_argument("--rounds", type=int, default=7, help="timed rounds (default 7)")
    arguments.add_argument("--dims", type=int, nargs="+", help="columns (default 8 to 256)")
    arguments.add_argument(
        "--stages", nargs="+", choices=STAGES, default=list(STAGES), help="default: all"
    )
    arguments.add_argument(
        "--launches",
        action="store_true",
        help="also note which kernels are launched; the profiler may slow down what is timed later",
    )
    arguments.add_argument("--rows", type=Path, help="file for the rows, a JSON line each")
    ceilings = arguments.add_mutually_exclusive_group()
    ceilings.add_argument("--ceilings", type=Path, help="rows of experiments.py")
    ceilings.add_argument(
        "--assume-ceilings", action="store_true", help="an H200's, as limits.py guesses them"
    )
    options = arguments.parse_args()
    torch.manual_seed(0)
    if not run_stages(settings_of(options), options.stages, RowFile(options.rows)):
        raise SystemExit("a stage failed; its row says why")


if __name__ == "__main__":
    main()
