"""Training steps of a table with rows in files, against the table in memory."""

from __future__ import annotations

import resource
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from common.command import is_selected
from common.id_streams import ZipfNumbers, spread
from common.report import Row, compare, quantity
from common.timing import Timing, elapsed_ms, interleave_rounds
from tiered.reads import random_reads_per_second
from torch import Tensor
from training.variants import train_all

import torch_dynemb as td
from torch_dynemb.storage.tiers import StorageStats

PEER = "in memory"
DIM = 64
BAG = 20
SLACK = 1.25  # of the bound
MISS_US = 5.0  # of the processor, for a row that is not in memory
ALL = "100%"
LEAST_MISSES = 100  # in a step, to say what one takes
MOST_AHEAD = 2  # steps between a prefetch and the lookup of its rows
IN_MEMORY = -1  # instead of a number of steps
# Zipf's exponent and the part of the rows in memory: the largest ratio to the step in memory; None:
# SLACK times what the misses cost at least
CASES: dict[tuple[float, str], float | None] = {
    (1.05, ALL): 1.08,
    (1.05, "25%"): None,
    (1.2, "25%"): None,
    (1.5, "25%"): 1.15,
}


@dataclass(frozen=True)
class Sizes:
    """Of the table, its batches and the measurement: steps before it, and those of a round."""

    ids: int
    bags: int
    rounds: int
    calls: int
    settling: int


@dataclass(frozen=True)
class Round:
    """Counts of a round of steps, for each step."""

    ms: float
    cpu_us: float
    misses: float  # rows that a step had to wait for
    fetched: float  # rows that came before the step that wanted them
    bytes_read: float
    bytes_written: float


class Trained:
    """A table that has seen all ids, and steps of it.

    Args:
        sizes: of the table.
        storage: where its rows lie; None: in memory.
        ahead: a step fetches the rows of the step that follows after so many; 0: of none.
    """

    def __init__(self, sizes: Sizes, storage: td.SSDStore | None, *, ahead: int = 0) -> None:
        self._bag = td.DynamicEmbeddingBag(
            DIM,
            mode="sum",
            name="bench",
            initializer=td.Uniform(-0.01, 0.01),
            optimizer=td.Adam(lr=0.01),
            storage=storage,
        )
        self._ahead = ahead
        self._grad = torch.full((sizes.bags, DIM), 1e-3)
        train_all(self._bag, sizes.ids, sizes.bags * BAG)

    def index_bytes(self) -> int:
        """Return memory of the index."""
        return self._bag.group.usage.memory()["index"]

    def stats(self) -> StorageStats | None:
        """Return counts of the cache and the store."""
        return self._bag.group.usage.storage()

    def steps(self, batches: list[Tensor]) -> None:
        """Train on all batches but the last MOST_AHEAD; wait until all is written."""
        for i, batch in enumerate(batches[:-MOST_AHEAD]):
            output = self._bag(batch)
            if self._ahead > 0:
                self._bag.prefetch(batches[i + self._ahead], ahead=self._ahead)
            output.backward(self._grad)
            self._bag.optimizer.step()
        if (tiers := self._bag.group.tables.tiers) is not None:
            tiers.drain()

    def round(self, batches: list[Tensor]) -> Round:
        """Time steps."""
        count = len(batches) - MOST_AHEAD
        before, cpu = self.stats(), _cpu_seconds()
        ms = elapsed_ms(lambda: self.steps(batches)) / count
        cpu_us = (_cpu_seconds() - cpu) / count * 1e6
        after = self.stats()
        if before is None or after is None:
            return Round(ms, cpu_us, 0, 0, 0, 0)
        return Round(
            ms,
            cpu_us,
            (after.misses - before.misses) / count,
            (after.prefetched - before.prefetched) / count,
            (after.bytes_read - before.bytes_read) / count,
            (after.bytes_written - before.bytes_written) / count,
        )


def training_rows(bench: str, folder: Path, sizes: Sizes, only: list[str]) -> Iterator[Row | str]:
    """Yield the name of each case as it starts, then its rows."""
    iops: float | None = None
    for (exponent, cache), target in CASES.items():
        case = f"training step, Adam D={DIM}, cache {cache}, Zipf {exponent}"
        ways = range(1 if cache == ALL else 1 + MOST_AHEAD)
        wanted = [way for way in ways if is_selected(only, _named(case, way), PEER)]
        if not wanted:
            continue
        yield case
        if target is None and iops is None:
            iops = random_reads_per_second(folder)
        with tempfile.TemporaryDirectory(dir=folder) as files:
            tables = {IN_MEMORY: Trained(sizes, None)}
            for way in wanted:
                # rows, because a part of them is of those before the step, which may bring new ones
                size = f"{sizes.ids} rows" if cache == ALL else cache
                storage = td.SSDStore(Path(files) / _named("rows", way), cache=size)
                tables[way] = Trained(sizes, storage, ahead=way)
            timed = _Timed(sizes, exponent, tables)
            del tables
        for way in wanted:
            most = target or SLACK * timed.bound_ms(way, iops) / timed.timings[IN_MEMORY].median_ms
            yield from timed.rows(bench, _named(case, way), way, most)


def _named(case: str, ahead: int) -> str:
    return case + ("", ", prefetch", ", prefetch 2 ahead")[ahead]


class _Timed:
    """Timed rounds of all candidates on the same batches, which none has seen before.

    Args:
        sizes: of the measurement.
        exponent: of Zipf's law, by which ids are drawn.
        tables: by the steps that their prefetches are ahead, or IN_MEMORY.
    """

    def __init__(self, sizes: Sizes, exponent: float, tables: Mapping[int, Trained]) -> None:
        self._sizes = sizes
        numbers = ZipfNumbers(sizes.ids, seed=1, exponent=exponent)
        ids = sizes.bags * BAG

        def draw(count: int) -> list[Tensor]:
            return [spread(numbers.draw(ids)).view(sizes.bags, BAG) for _ in range(count)]

        settled = draw(sizes.settling + MOST_AHEAD)
        for table in tables.values():
            table.steps(settled)
        self._rounds: dict[int, list[Round]] = {way: [] for way in tables}
        batches = draw((1 + sizes.rounds) * sizes.calls + MOST_AHEAD)

        def timed(way: int) -> Callable[[int], float]:
            def run(number: int) -> float:
                begin = number * sizes.calls
                done = tables[way].round(batches[begin : begin + sizes.calls + MOST_AHEAD])
                self._rounds[way].append(done)
                return done.ms

            return run

        names = {str(way): way for way in tables}
        timings = interleave_rounds(
            {name: timed(way) for name, way in names.items()}, rounds=sizes.rounds, warmup=1
        )
        self.timings: dict[int, Timing] = {w: timings[name] for name, w in names.items()}

    def _median(self, way: int, what: Callable[[Round], float]) -> float:
        return statistics.median(what(done) for done in self._rounds[way][1:])

    def _fetched(self, way: int) -> float:
        """Return rows of a step that came from files."""
        return self._median(way, lambda done: done.misses + done.fetched)

    def bound_ms(self, way: int, iops: float | None) -> float:
        """Return the least time of a step: its work and that of its misses, or the reads."""
        in_memory = self.timings[IN_MEMORY].median_ms
        misses = self._fetched(way)
        reads_ms = misses / iops * 1e3 if iops else 0.0
        return max(in_memory + MISS_US * misses / 1e3, reads_ms)

    def rows(self, bench: str, case: str, way: int, most: float) -> Iterator[Row]:
        """Yield the step against the step in memory, and the processor's time for a miss."""
        fetched = self._fetched(way)
        yield compare(
            bench,
            case,
            self.timings[way],
            PEER,
            self.timings[IN_MEMORY],
            target=most,
            misses_a_step=self._median(way, lambda done: done.misses),
            fetched_ahead_a_step=self._median(way, lambda done: done.fetched),
            bytes_read_a_step=self._median(way, lambda done: done.bytes_read),
            bytes_written_a_step=self._median(way, lambda done: done.bytes_written),
            ids=self._sizes.ids,
            bags=self._sizes.bags,
            bag=BAG,
            threads=torch.get_num_threads(),
        )
        if fetched >= LEAST_MISSES:
            ours, theirs = (self._median(w, lambda done: done.cpu_us) for w in (way, IN_MEMORY))
            each = (ours - theirs) / fetched
            yield quantity(bench, f"{case}: processor's time for a miss", each, "us")


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
