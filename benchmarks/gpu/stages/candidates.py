"""Common parts of stages: sizes, candidates that take turns, rows against an op's own limit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.report import Row
from benchmarks.common.timing import Timing, interleave
from benchmarks.gpu import limits
from benchmarks.gpu.launches import recorded_launches
from benchmarks.gpu.limits import Ceilings, Shape, Work
from benchmarks.gpu.workload import Batch, capture, generator_of
from torch_dynemb import ops

PEER_OPTIMIZERS = {"SGD": "SGD", "Adam": "SparseAdam"}  # ours: that of torch.optim
Run = Callable[[int, Batch], object]  # of a batch and its number


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
    """Return the wanted share of an op's own limit."""
    return 0.7 if dim >= 64 else 0.6


def against_limit(
    settings: Settings, parts: list[Work], timing: Timing, shape: Shape
) -> dict[str, Any]:
    """Return keys of a row: sizes, rate, what the op needs and how close it came."""
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
    """Raise what kernels have reported."""
    if settings.cuda:
        torch.cuda.synchronize()
        ops.raise_device_errors(torch.cuda.current_device())


class Candidates:
    """Candidates that are timed together: ops eagerly, and on a GPU by replay of graphs."""

    def __init__(self, settings: Settings, batches: Sequence[Batch]) -> None:
        self._settings = settings
        self._batches = batches
        self._runs: dict[str, Callable[[int], object]] = {}
        self._calls: dict[str, int] = {}

    def _add(self, name: str, run: Callable[[int], object], calls: int) -> None:
        """Add a candidate; ``run`` gets numbers below ``calls``, over and over again."""
        self._runs[name] = lambda call: run(call % calls)
        self._calls[name] = calls

    def eager(self, name: str, run: Run) -> None:
        """Add a candidate that takes all batches."""
        self._add(name, lambda n: run(n, self._batches[n]), len(self._batches))

    def replayed(
        self,
        name: str,
        run: Run,
        end: Callable[[], object] | None = None,
        *,
        each: bool = False,
    ) -> None:
        """Add a candidate that replays graphs.

        Args:
            name: of the candidate.
            run: what the graph of a batch does.
            end: is called when all batches are done, or after ``each`` of them.
            each: see ``end``.

        One graph for all of them would make the library keep room for three times the ids of all.
        """
        if not self._settings.cuda:
            self.eager(name, run)
            return
        pool = torch.cuda.graph_pool_handle()
        graphs = [
            capture(functools.partial(run, number, batch), pool)
            for number, batch in enumerate(self._batches)
        ]

        def replay(number: int) -> None:
            graphs[number].replay()
            if end is not None and (each or number == len(graphs) - 1):
                end()

        self._add(name, replay, len(graphs))

    def both(self, name: str, run: Run, end: Callable[[], object] | None = None) -> None:
        """Add a candidate that is replayed, and one that takes the same batches eagerly."""
        self.eager(f"{name}, eager", run)
        self.replayed(name, run, end)

    def peer(self, name: str, run: Run) -> None:
        """Add a peer, which may be much slower: it takes the first batches only."""
        calls = min(self._settings.peer_calls, len(self._batches))
        self._add(name, lambda n: run(n, self._batches[n]), calls)

    def time(self) -> dict[str, Timing]:
        """Return timings of one call."""
        settings = self._settings
        return interleave(
            self._runs,
            rounds=settings.rounds,
            calls=self._calls,
            warmup=2,
            device=settings.device,
        )

    def launched(self, stage: str) -> Iterator[Row]:
        """Yield, with --launches, a row that names our kernels in all that was timed."""
        if not self._settings.launches:
            return
        with recorded_launches() as kernels:
            for name, run in self._runs.items():
                for call in range(self._calls[name]):
                    run(call)
        row: Row = {"bench": "gpu_kernels", "case": stage, "ours_ms": None, "valid": True}
        yield row | {"kernels": sorted(kernels)}


def random_gradient(rows: int, dim: int, device: torch.device) -> Tensor:
    """Return a gradient small enough that weights stay finite."""
    return torch.randn(rows, dim, generator=generator_of(device, 3), device=device) * 1e-3
