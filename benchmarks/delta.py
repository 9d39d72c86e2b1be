"""Delta logs: what recording costs a step, bytes, how long a publish stops training, followers.

A table of rows of 64 columns, of which a commit has a tenth.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from common.command import is_selected, parser, positive
from common.id_streams import distinct_ids
from common.report import Report, Row, compare, quantity
from common.timing import elapsed_ms, interleave
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import serving
from torch_dynemb.delta_log import DeltaLog, RedisRows, RedisSink, follow
from torch_dynemb.table.changes import record_changes

BENCH = "delta"
DIM = 64
STEP_IDS = 8192
PEER = "nothing recorded"


@dataclass(frozen=True)
class Measured:
    """Arguments of a case.

    Attributes:
        ids: of the table; a commit has a tenth of them.
        rounds: that are timed.
        folder: for files.
    """

    ids: int
    rounds: int
    folder: Path

    @property
    def changed(self) -> int:
        """Rows of a commit."""
        return self.ids // 10

    def known(self) -> Tensor:
        """Return the ids of the table, and as many again that it has not got."""
        return distinct_ids(0, 2 * self.ids)

    def bag(self) -> td.DynamicEmbeddingBag:
        """Return a bag with these ids in its table."""
        bag = td.DynamicEmbeddingBag(
            DIM, mode="sum", optimizer=td.RowWiseAdagrad(lr=0.1), name="ads"
        )
        for ids in self.known()[: self.ids].split(1 << 16):
            bag.group.insert_or_assign(0, ids, torch.randn(len(ids), DIM))
        return bag


def step(bag: td.DynamicEmbeddingBag, ids: Tensor) -> None:
    """Train one step on bags of four ids."""
    bag(ids[: len(ids) // 4 * 4].view(-1, 4)).sum().backward()
    bag.optimizer.step()


def recording(of: Measured) -> Iterator[Row]:
    """Yield a step with recorded changes against one without."""
    known, bags = of.known()[: of.ids], [of.bag(), of.bag()]
    record_changes(bags[0].group.tables, "benchmark", scores=False)
    batches = [known[torch.randint(0, of.ids, (STEP_IDS,))] for _ in range(16)]
    timings = interleave(
        {
            "recorded": lambda call: step(bags[0], batches[call % 16]),
            "not": lambda call: step(bags[1], batches[call % 16]),
        },
        rounds=of.rounds,
        calls=20,
    )
    peer = timings["not"]
    yield compare(BENCH, RECORDING, timings["recorded"], PEER, peer, target=1.03)


def publishing(of: Measured) -> Iterator[Row]:
    """Yield commits of changed rows: the stall of training, and their size."""
    bag, known = of.bag(), of.known()
    path = of.folder / "publishing"
    waited, whole, log = [], [], DeltaLog(path)
    log.attach(bag)
    for _ in range(of.rounds + 1):
        touched = known[torch.randperm(of.ids)[: of.changed]]
        for ids in touched.split(STEP_IDS):
            step(bag, ids)
        began = time.perf_counter()
        log.publish()
        waited.append(time.perf_counter() - began)
        step(bag, touched[:STEP_IDS])  # training goes on while the thread writes
        log.flush()
        whole.append(time.perf_counter() - began)
    log.close()
    written = sum(file.stat().st_size for file in path.glob("r*/*.delta"))
    rows = 0

    class Counting:
        def check(self, commit: td.delta_log.Commit) -> None:
            pass

        def apply(self, commit: td.delta_log.Commit) -> None:
            nonlocal rows
            rows += sum(delta.changed.ids.numel() for delta in commit.tables.values())

    follow(path, Counting()).update()
    yield quantity(
        BENCH,
        PUBLISH,
        statistics.median(waited[1:]),
        "s",
        target=0.1,
        rows=of.changed,
        until_written_s=statistics.median(whole[1:]),
    )
    yield quantity(
        BENCH, BYTES, written / rows / (8 + 4 * DIM), "x of id and row", target=1.1, rows=rows
    )


def quantized(of: Measured) -> Iterator[Row]:
    """Yield the size of commits in other forms of rows, and the stall of training."""
    known = of.known()
    for form, target in FORMS.items():
        bag, path = of.bag(), of.folder / f"rows of {form}"
        waited, log = [], DeltaLog(path, rows=form)
        log.attach(bag)
        for _ in range(of.rounds + 1):
            ids = known[torch.randperm(of.ids)[: of.changed]]
            bag.group.insert_or_assign(0, ids, torch.randn(len(ids), DIM))
            began = time.perf_counter()
            log.publish()
            waited.append(time.perf_counter() - began)
            log.flush()
        log.close()
        written = sum(file.stat().st_size for file in path.glob("r*/*.delta"))
        rows = of.changed * len(waited)
        yield quantity(
            BENCH,
            f"{FORM} {form}",
            written / rows / (8 + 4 * DIM),
            "x of id and row",
            target=target,
            rows=rows,
            publish_s=statistics.median(waited[1:]),
        )


def applying(of: Measured) -> Iterator[Row]:
    """Yield the time of a row that followers apply, of known and of new ids."""
    known = of.known()
    for name, begin, target in ((APPLY, 0, 1.0), (APPLY_NEW, of.ids, None)):
        bag, path = of.bag(), of.folder / f"applying {begin}"
        log = DeltaLog(path)
        log.attach(bag)
        trained = of.bag()
        td.checkpoint.load(path / "base", trained)
        live = serving.live(bag, headroom=2 * of.ids)
        followers = {
            "live tables": follow(path, live),
            "a model that trains": follow(path, trained),
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in followers}
        for number in range(min(of.rounds + 1, 9)):
            ids = known[begin + number * of.changed : begin + (number + 1) * of.changed]
            bag.group.insert_or_assign(0, ids, torch.randn(len(ids), DIM))
            log.publish()
            log.flush()
            for kind, follower in followers.items():
                seconds[kind].append(elapsed_ms(follower.update) / 1e3)
        log.close()
        for kind, taken in seconds.items():
            us = 1e6 * statistics.median(taken[1:] or taken) / of.changed
            yield quantity(BENCH, f"{name}, {kind}", us, "us a row", target=target)


def delay(of: Measured) -> Iterator[Row]:
    """Yield the time from ``log.step()`` to a changed answer of a served model."""
    bag, known = of.bag(), of.known()
    path = of.folder / "delay"
    log = DeltaLog(path, every_steps=1)
    log.attach(bag)
    live = serving.live(bag, headroom=of.ids)
    follower = follow(path, live)
    follower.start(every_seconds=0.001)
    taken = []
    for _ in range(of.rounds + 1):
        ids = known[torch.randint(0, of.ids, (STEP_IDS,))]
        before = live(ids[:1].view(1, 1))
        step(bag, ids)
        began = time.perf_counter()
        log.step()
        while torch.equal(live(ids[:1].view(1, 1)), before):
            follower.check()
        taken.append(time.perf_counter() - began)
    follower.stop()
    log.close()
    yield quantity(BENCH, DELAY, statistics.median(taken[1:]), "s", rows=STEP_IDS)


@contextmanager
def redis_on_one_core(folder: Path) -> Iterator[str]:
    """Run a Redis server, and this program, on one core. Yields its URL."""
    cores, socket = os.sched_getaffinity(0), folder / "redis"
    assert REDIS is not None
    os.sched_setaffinity(0, {min(cores)})
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    server = subprocess.Popen([REDIS, *options], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            time.sleep(0.01)
        yield f"unix://{socket}"
    finally:
        server.kill()
        server.wait()
        os.sched_setaffinity(0, cores)


def to_redis(of: Measured) -> Iterator[Row]:
    """Yield the time of a commit into a Redis Stream, and into rows by id, of new ids."""
    known, bag = of.known(), of.bag()
    base = of.folder / "redis base"
    td.checkpoint.save(base, bag)
    with redis_on_one_core(of.folder) as url:
        log = DeltaLog(RedisSink(url, "log"))
        log.attach(bag, base=base)
        follower = RedisRows(url, "rows").follow(RedisSink(url, "log"), base=base)
        seconds: dict[str, list[float]] = {REDIS_LOG: [], REDIS_ROWS: []}
        for number in range(min(of.rounds + 1, 9)):
            begin = of.ids + number * of.changed
            ids = known[begin : begin + of.changed]
            bag.group.insert_or_assign(0, ids, torch.randn(len(ids), DIM))
            log.publish()
            seconds[REDIS_LOG].append(elapsed_ms(log.flush) / 1e3)
            seconds[REDIS_ROWS].append(elapsed_ms(follower.update) / 1e3)
        log.close()
    for case, taken in seconds.items():
        target = 1.5 * of.changed / 100_000
        yield quantity(
            BENCH, case, statistics.median(taken[1:]), "s", target=target, rows=of.changed
        )


REDIS = shutil.which("redis-server") or shutil.which("valkey-server")
REDIS_LOG = "a commit of a tenth of the rows into a Redis Stream, one core"
REDIS_ROWS = "a commit of a tenth of the rows from there into Redis rows, one core"
RECORDING = "a training step, changes recorded"
PUBLISH = "publish of a tenth of the rows, beside training"
BYTES = "bytes of a delta"
FORM = "bytes of a delta, rows of"
# a byte or two a column, with 8 of the id and 8 of scale and bias, beside 8 + 256
FORMS: dict[Literal["int8", "fp16"], float] = {"int8": 0.31, "fp16": 0.53}
APPLY = "applied rows of known ids"
APPLY_NEW = "applied rows of new ids"
DELAY = "from step() to a changed answer"
CASES: dict[str, Callable[[Measured], Iterator[Row]]] = {
    RECORDING: recording,
    f"{PUBLISH}; {BYTES}": publishing,
    FORM: quantized,
    f"{APPLY}; {APPLY_NEW}": applying,
    DELAY: delay,
    f"{REDIS_LOG}; {REDIS_ROWS}": to_redis,
}


def rows(cases: list[str], of: Measured) -> Iterator[Row | str]:
    """Yield the name of each case as it starts, then its rows."""
    for name in cases:
        torch.manual_seed(0)
        yield name
        yield from CASES[name](of)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="of the table (default 1,000,000)")
    options = arguments.parse_args()
    ids = options.ids or (20_000 if options.quick else 1_000_000)
    cases = [name for name in CASES if is_selected(options.only, name, PEER)]
    if REDIS is None and to_redis in [CASES[name] for name in cases]:
        print(
            "no redis-server: its cases are left out; apt-get install redis-server", file=sys.stderr
        )
        cases = [name for name in cases if CASES[name] is not to_redis]
    report = Report(as_json=options.json, cases=len(cases))
    with tempfile.TemporaryDirectory() as folder:
        report.take(rows(cases, Measured(ids, options.rounds, Path(folder))))
    report.close()


if __name__ == "__main__":
    main()
