"""The case that DynamicEmb publishes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from benchmarks.common.id_streams import ZipfNumbers
from benchmarks.common.report import Row, compare
from benchmarks.common.timing import Timing
from benchmarks.gpu import limits
from benchmarks.gpu.limits import Shape
from benchmarks.gpu.stages.candidates import (
    PEER_OPTIMIZERS,
    Candidates,
    Settings,
    against_limit,
    check_device,
    random_gradient,
)
from benchmarks.gpu.workload import Batch, Ours, Static, power_law_batch, unique_count

STATIC = "nn.Embedding(sparse)"
# Published for one H100, in ms, by DynamicEmb: itself, and FBGEMM's static TBE.
PUBLISHED = {"Adam step": (2.185, 1.352), "SGD step": (1.923, 0.959), "lookup": (0.645, 0.457)}


def measure_published(settings: Settings) -> Iterator[Row]:
    """Yield ten tables, D=128, power law 1.05, a vector per id: DynamicEmb's own benchmark.

    The tables are reserved, so that no growth is in the times.
    """
    tables, dim, device = settings.published_tables, 128, settings.device
    rows, ids = settings.published_rows, settings.published_ids // settings.published_tables
    law = ZipfNumbers(rows, seed=11, device=device)
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
