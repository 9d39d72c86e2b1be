"""Adam steps of tables with rows in host memory, beside the same tables in HBM."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common.id_streams import ZipfNumbers
from benchmarks.common.report import Row, compare
from benchmarks.common.timing import Timing
from benchmarks.gpu import limits
from benchmarks.gpu.limits import Shape
from benchmarks.gpu.stages.candidates import Candidates, Settings, check_device, random_gradient
from benchmarks.gpu.workload import Batch, Ours, power_law_batch, unique_count
from torch_dynemb import HostStore

IN_HBM = "all rows in HBM"
# Shares of the rows that lie in HBM. Rows come in the order of their frequency, as ids of a stream
# mostly do, so the most frequent lie there.
SHARES = {"10 % of the rows in HBM": 0.1, "rows in host memory": 0.0}
# Published for one H100 with values in host memory alone, in ms: DynamicEmb, FBGEMM's UVM.
PUBLISHED = (43.5, 24.1)


def host_link_ms(shape: Shape, optimizer: str) -> float:
    """Return the least time on the link, if all rows lie in host memory.

    A lookup reads the row of each distinct id; a backward reads it again with its element states,
    and writes both. The link carries both directions at once.
    """
    states, _ = limits.STATES[optimizer]
    row = shape.unique * 4 * shape.dim
    up, down = row * (1 + states), row * (2 + states)
    return max(up, down) / limits.ASSUMED_HOST_LINK_GB_PER_S / 1e6


def measure_host_rows(settings: Settings) -> Iterator[Row]:
    """Yield the published case with rows in HBM, in host memory, and in both."""
    tables, dim, device = settings.published_tables, 128, settings.device
    rows, ids = settings.published_rows, settings.published_ids // settings.published_tables
    law = ZipfNumbers(rows, seed=11, device=device)
    batches = [power_law_batch(law, tables, ids, rows) for _ in range(settings.batches)]
    shape = Shape(ids=ids * tables, unique=unique_count(batches), bags=None, dim=dim)
    grad = random_gradient(shape.ids, dim, device)
    row_bytes = tables * rows * 4 * dim * (1 + limits.STATES["Adam"][0])
    candidates = Candidates(settings, batches)
    places = {}
    for name, share in {IN_HBM: 1.0, **SHARES}.items():
        storage = None if share == 1.0 else HostStore(hbm=int(share * row_bytes))
        ours = Ours(
            "Adam",
            tables=tables,
            rows=rows,
            dim=dim,
            spare=shape.ids,
            bags=False,
            device=device,
            storage=storage,
        )
        places[name] = ours.group.usage.split_rows()

        def step(n: int, batch: Batch, ours: Ours = ours) -> None:
            ours.step(batch, grad)

        candidates.both(name, step, ours.group.end_step)
    timings = candidates.time()
    check_device(settings)
    for name in SHARES:
        for timed in (name, f"{name}, eager"):
            extra = {f"{place}_bytes": size for place, size in places[name].items()}
            yield compare(
                "gpu_host_rows",
                f"Adam step, {timed}, {tables} tables, D={dim}, power law 1.05",
                timings[timed],
                IN_HBM,
                timings[timed.replace(name, IN_HBM)],
                unique=shape.unique,
                host_link_ms=host_link_ms(shape, "Adam"),
                **extra,
            )
    theirs, uvm = PUBLISHED
    yield compare(
        "gpu_host_rows",
        f"Adam step, rows in host memory, {tables} tables, D={dim}, power law 1.05",
        timings["rows in host memory"],
        "FBGEMM's UVM, published for an H100",
        Timing((uvm,)),
        dynamicemb_ms=theirs,
        published=True,
    )
    yield from candidates.launched("host_rows")
