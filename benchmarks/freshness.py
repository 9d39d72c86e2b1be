"""From an event to an answer: how old what a server knows is, and what survives kills.

A program writes events with their times to a file. A trainer reads them, trains, and publishes
every half second to a delta log. A server follows the log, and a client asks it all the time. An
answer says how many events it reflects, so the age of every event at its first answer is known.

Then trainer and server are killed again and again. A table of SGD with lr 1 counts events: at the
end, its rows are compared with the file. Two ids that occur once in each batch, and a number in the
dense state, show an answer from two versions.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.command import is_selected, parser, positive
from common.report import Report, Row, quantity
from online.events import EVENT_BYTES, read, write_whole
from online.model import Model

import torch_dynemb as td

BENCH = "freshness"
_CALIBRATION = 300_000  # events
HERE = Path(__file__).resolve().parent
PEER = "target"
FRESH = "event to answer, p99"
SHARE = "training while publishing / without"
LOST, TWICE, MIXED = "events lost", "events counted twice", "answers of two versions"
RECOVERY = "killed trainer to its next commit, without the load"


def program(name: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start one of the programs."""
    command = [sys.executable, str(HERE / "online" / f"{name}.py"), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def times_of(process: subprocess.Popen[str]) -> list[dict[str, float]]:
    """Wait for a trainer. Return the lines that it has printed."""
    printed, _ = process.communicate()
    return [json.loads(line) for line in printed.splitlines()]


@dataclass
class Answers:
    """A client that asks a server, also one that is started again.

    Attributes:
        at: times of answers, in nanoseconds, and the events that they reflect.
        mixed: number of answers with rows or a dense state of another version.
    """

    socket: Path
    at: list[tuple[int, int]] = field(default_factory=list)
    mixed: int = 0
    _connection: Connection | None = None

    def ask(self) -> None:
        """Ask once, if there is a server."""
        try:
            if self._connection is None:
                self._connection = Client(str(self.socket), "AF_UNIX")
            self._connection.send(None)
            canaries, events, batches = self._connection.recv()
        except (OSError, EOFError):  # killed, or not there yet
            self._connection = None
            return
        self.at.append((time.time_ns(), events))
        self.mixed += set(canaries) != {batches}

    def ages(self, path: Path) -> list[float]:
        """Return the age of each event at its first answer, in seconds."""
        times = read(path, 0, path.stat().st_size // EVENT_BYTES)[:, 1]
        result, known = [], None
        for now, events in self.at:
            if known is not None and events > known:
                result += ((now - times[known:events]) / 1e9).tolist()
            known = events if known is None else max(known, events)
        return result


@dataclass
class Loop:
    """The programs of one measurement.

    Attributes:
        folder: of the files.
        seconds: for which events come, at least.
        rate: of a second.
        known: distinct ids.
    """

    folder: Path
    seconds: int
    rate: float
    known: int

    @property
    def events(self) -> Path:
        return self.folder / "events"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def trainer(self) -> subprocess.Popen[str]:
        return program("trainer", self.events, "--log", self.log)

    def server(self) -> subprocess.Popen[str]:
        return program("server", self.log, self.folder / "socket")

    def run(self, kills: int, draw: random.Random) -> tuple[Answers, list[float], list[float]]:
        """Run to the end of the events.

        Returns:
            Answers; seconds from kills of the trainer to its next commits, without the load; and
            the processor time until then, which other programs do not change.
        """
        self.folder.mkdir()
        self.events.touch()
        trainer = self.trainer()
        while not (self.log / "base" / "manifest.json").exists():
            time.sleep(0.01)
        answers, server = Answers(self.folder / "socket"), self.server()
        while not answers.at:
            answers.ask()
            time.sleep(0.01)
        options = ["--rate", self.rate, "--known", self.known]
        writer = program("events", self.events, *options, stdin=subprocess.PIPE)
        while self.count() == 0:  # its start may take seconds
            time.sleep(0.01)
        recovered: list[float] = []
        cpu: list[float] = []
        left = {"trainer": kills, "server": kills}
        turn = time.monotonic() + 2
        end = time.monotonic() + self.seconds
        while any(left.values()) or time.monotonic() < end:
            answers.ask()
            time.sleep(0.01)
            if not any(left.values()) or time.monotonic() < turn:
                continue
            name = draw.choice([of for of in left for _ in range(left[of])])
            left[name] -= 1
            if name == "server":
                server.kill()
                server.communicate()
                server = self.server()
            else:
                trainer.kill()
                trainer.communicate()
                killed = time.monotonic()
                trainer = self.trainer()
                assert trainer.stdout is not None
                line = json.loads(trainer.stdout.readline())
                recovered.append(time.monotonic() - killed - line["load_s"])
                cpu.append(line["cpu_s"])
            turn = time.monotonic() + draw.uniform(0.2, 2.0)
        writer.communicate("")  # ends it
        times_of(trainer)
        assert trainer.returncode == 0
        while answers.at[-1][1] < self.count():
            answers.ask()
            time.sleep(0.01)
        server.kill()
        server.communicate()
        return answers, recovered, cpu

    def count(self) -> int:
        """Return the number of events in the file."""
        return self.events.stat().st_size // EVENT_BYTES

    def differences(self) -> tuple[int, int]:
        """Return how many events were lost, and counted twice."""
        model = Model()
        td.delta_log.resume(self.log, model, progress=False)
        expected = np.bincount(read(self.events, 0, self.count())[:, 0], minlength=self.known)
        ids = torch.arange(self.known)
        counted = torch.zeros(self.known)
        there = model.counts.group.contains(0, ids)
        counted[there] = model.counts.group.read(0, ids[there])[:, 0]
        more = counted.long() - torch.from_numpy(expected)
        return int(-more.clamp(max=0).sum()), int(more.clamp(min=0).sum())


@dataclass(frozen=True)
class Measured:
    """Arguments of a case."""

    folder: Path
    seconds: int
    known: int
    rounds: int
    kills: int

    def full_rate(self) -> float:
        """Return events of a second that a trainer takes from a whole file."""
        times = self.trained(self.folder / "calibration", 500_000, None)
        return 500_000 / times["whole_s"]

    def trained(self, folder: Path, total: int, log: Path | None) -> dict[str, float]:
        folder.mkdir(exist_ok=True)
        events = folder / "events"
        if not events.exists():
            write_whole(events, total, self.known)
        arguments = [] if log is None else ["--log", log]
        return times_of(program("trainer", events, *arguments))[-1]


def share(of: Measured) -> Iterator[Row]:
    """Yield the time of training at full rate while it publishes, against training alone."""
    rate = of.full_rate()
    total = int(rate * of.seconds / 4)
    ratios, stalls = list[float](), list[float]()
    for number in range(of.rounds):
        log = of.folder / f"log {number}"
        order = (None, log) if number % 2 else (log, None)
        taken = {where: of.trained(of.folder / "share", total, where) for where in order}
        alone, published = taken[None], taken[log]
        ratios.append(published["whole_s"] / alone["whole_s"])
        stalls.append(published["publish_s"] / published["whole_s"])
    yield quantity(
        BENCH,
        SHARE,
        statistics.median(ratios),
        "x",
        target=1.1,
        stall_share=statistics.median(stalls),
        events=total,
        events_per_s=rate,
    )


def fresh(of: Measured) -> Iterator[Row]:
    """Yield the age of events at their first answer, at half of the full rate."""
    rate = of.full_rate() / 2
    loop = Loop(of.folder / "fresh", of.seconds, rate, of.known)
    answers, _, _ = loop.run(0, random.Random(1))
    ages = answers.ages(loop.events)
    p50, p99 = np.quantile(ages, [0.5, 0.99])
    yield quantity(
        BENCH,
        FRESH,
        float(p99),
        "s",
        target=2.0,
        p50_s=float(p50),
        events=len(ages),
        events_per_s=rate,
        mixed=answers.mixed,
    )


def killed(of: Measured) -> Iterator[Row]:
    """Yield what kills of trainer and server have cost."""
    rate = of.full_rate() / 4
    loop = Loop(of.folder / "killed", of.seconds, rate, of.known)
    answers, recovered, cpu = loop.run(of.kills, random.Random(2))
    lost, twice = loop.differences()
    kills: dict[str, Any] = {"kills_each": of.kills, "events": loop.count()}
    yield quantity(BENCH, LOST, lost, "events", target=0, **kills)
    yield quantity(BENCH, TWICE, twice, "events", target=0, **kills)
    yield quantity(BENCH, MIXED, answers.mixed, "answers", target=0, answers=len(answers.at))
    yield quantity(
        BENCH,
        RECOVERY,
        max(recovered),
        "s",
        target=5.0,
        median_s=statistics.median(recovered),
        median_cpu_s=statistics.median(cpu),
        **kills,
    )


CASES: dict[str, Callable[[Measured], Iterator[Row]]] = {
    SHARE: share,
    FRESH: fresh,
    f"{LOST}; {TWICE}; {MIXED}; {RECOVERY}": killed,
}


def rows(cases: list[str], of: Measured) -> Iterator[Row | str]:
    """Yield the name of each case as it starts, then its rows."""
    for name in cases:
        yield name
        yield from CASES[name](of)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=positive, help="of events (default 30)")
    options = arguments.parse_args()
    quick = options.quick
    cases = [name for name in CASES if is_selected(options.only, name, PEER)]
    report = Report(as_json=options.json, cases=len(cases))
    with tempfile.TemporaryDirectory() as folder:
        of = Measured(
            Path(folder),
            options.seconds or (6 if quick else 30),
            20_000 if quick else 500_000,
            1 if quick else options.rounds,
            1 if quick else 20,
        )
        report.take(rows(cases, of))
    report.close()


if __name__ == "__main__":
    main()
