"""Program that runs each part of small_shapes.py by itself on a GPU, and compares it with the CPU.

A part that faults, hangs or differs does not stop the others: each optimizer has a process of its
own, and what comes after a failure has another one. The name of a part is printed before it begins.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.isolated import SECONDS, Tell, run_isolated
from benchmarks.gpu.launches import recorded_launches
from benchmarks.gpu.small_shapes import (
    FIRST_PART,
    OPTIMIZERS,
    Recorder,
    TableCalls,
    differences,
    finish,
    parts_of,
    wanted_ops,
)
from benchmarks.gpu.value_calls import ValueCalls

MOST_FAILURES = 2  # of a part with different optimizers, before it is left out
PARTS = (*TableCalls.part_names, *ValueCalls.part_names)


@dataclass
class PartRecord:
    """Result of a part with an optimizer, compared with the CPU's.

    Attributes:
        optimizer, part: names.
        result: passed, differs, failed, or not run.
        reason: the error, how the process died, or which results differ.
        ops: names of the ops that ran.
        kernels: names of our kernels that were launched; empty on the CPU.
        blocking: after a failure, the reason of a second run with CUDA_LAUNCH_BLOCKING=1, in which
            the error belongs to the call that raises it.
    """

    optimizer: str
    part: str
    result: str = "failed"
    reason: str = ""
    ops: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    blocking: str = ""

    def line(self) -> str:
        """Return a line for reading."""
        again = f" Again, launch by launch: {self.blocking}" if self.blocking else ""
        return f"{self.optimizer}: {self.part}: {self.result}. {self.reason}{again}"


class IsolatedParts:
    """Runner of parts in forked processes, each compared with the CPU in the same process.

    One process runs the parts of an optimizer until one fails or hangs, and another one runs those
    after it. All that is known is in ``records`` at every moment.

    Args:
        device: to compare with the CPU.
        records: file for a JSON line for each part.
        seconds: budget for all of them.
        watchdog: seconds for each part.
    """

    def __init__(
        self, device: torch.device, records: Path, *, seconds: float, watchdog: float = SECONDS
    ) -> None:
        self.done: list[PartRecord] = []
        self._device = device
        self._file = records
        self._end = time.monotonic() + seconds
        self._watchdog = watchdog
        records.write_text("")

    def run(self, optimizer: str, names: Sequence[str]) -> None:
        """Run parts of a program with an optimizer."""
        waiting = []
        for name in names:
            failed = self._failed(name)
            if len(failed) < MOST_FAILURES:
                waiting.append(name)
            else:
                reason = f"it failed with {', '.join(failed)}"
                self._add(PartRecord(optimizer, name, "not run", reason))
        while waiting and time.monotonic() < self._end:
            failure = self._run_until_failure(optimizer, waiting)
            if failure is not None:
                self._repeat_blocking(failure)
                self._add(failure)
        for name in waiting:
            self._add(PartRecord(optimizer, name, "not run", "the time was used up"))

    def _failed(self, part: str) -> list[str]:
        """Return the optimizers with which a part has failed."""
        return [one.optimizer for one in self.done if (one.part, one.result) == (part, "failed")]

    def _run_until_failure(self, optimizer: str, waiting: list[str]) -> PartRecord | None:
        """Run parts, take those that have run from the list, and return the one that failed."""
        failures = []

        def take(record: PartRecord) -> None:
            waiting.remove(record.part)
            if record.result == "failed":
                failures.append(record)
            else:
                self._add(record)

        ended = self._isolated(optimizer, list(waiting), take)
        if ended and not failures:
            return PartRecord(optimizer, waiting.pop(0), "failed", ended)
        return failures[0] if failures else None

    def _repeat_blocking(self, failure: PartRecord) -> None:
        """Note what a part that failed says if each launch is waited for."""
        again: list[PartRecord] = []
        environ = {"CUDA_LAUNCH_BLOCKING": "1"}
        ended = self._isolated(failure.optimizer, [failure.part], again.append, environ)
        found = [f"{one.result}. {one.reason}" for one in again]
        failure.blocking = ended or (found[0] if found else "the time was used up")

    def _isolated(
        self,
        optimizer: str,
        names: list[str],
        take: Callable[[PartRecord], None],
        environ: Mapping[str, str] | None = None,
    ) -> str:
        """Run parts in a fork until one fails; return why it ended, if not by itself."""
        has_ids = names[0] != FIRST_PART and optimizer not in self._failed(FIRST_PART)

        def work(tell: Tell) -> None:
            given: dict[str, Tensor] = {}
            expected: dict[str, Tensor] = {}
            print(f"{optimizer}: makes tables\n", end="", flush=True)
            parts = parts_of(self._device, optimizer, given)
            on_cpu = parts_of(torch.device("cpu"), optimizer, expected)
            if has_ids:
                parts[FIRST_PART]()
                on_cpu[FIRST_PART]()
            for name in names:
                if time.monotonic() > self._end:
                    return
                given.clear()
                expected.clear()
                print(f"{optimizer}: {name} begins\n", end="", flush=True)
                record = PartRecord(optimizer, name)
                self._compare(parts[name], on_cpu[name], given, expected, record)
                tell(asdict(record))
                if record.result == "failed":
                    return  # the device may not answer any more

        return run_isolated(
            work,
            lambda message: take(PartRecord(**message)),
            seconds=self._watchdog,
            environ=environ,
        )

    def _compare(
        self,
        part: Callable[[], None],
        on_cpu: Callable[[], None],
        given: dict[str, Tensor],
        expected: dict[str, Tensor],
        record: PartRecord,
    ) -> None:
        on_gpu = self._device.type == "cuda"
        launches = recorded_launches() if on_gpu else contextlib.nullcontext(set[str]())
        try:
            with launches as launched, Recorder() as recorder:
                finish(self._device, part)
        except Exception as error:
            traceback.print_exc()
            record.reason = f"{type(error).__name__}: {str(error)[:1000]}"
            return
        record.ops, record.kernels = sorted(recorder.names), sorted(launched)
        on_cpu()
        wrong = differences(expected, given)
        record.result = "differs" if wrong else "passed"
        record.reason = ", ".join(wrong[:20])

    def _add(self, record: PartRecord) -> None:
        self.done.append(record)
        print(f"{record.line()}\n", end="", flush=True)
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")


def run_optimizers(
    device: torch.device, optimizers: list[str], *, records: Path, seconds: float, jobs: int
) -> list[PartRecord]:
    """Run the parts of optimizers in several processes side by side, and return their records.

    Args:
        device: to compare with the CPU.
        optimizers: keys of OPTIMIZERS.
        records: file for the records; with several jobs, each of them has a file beside it.
        seconds: budget.
        jobs: number of processes.
    """
    if jobs == 1:
        isolated = IsolatedParts(device, records, seconds=seconds)
        for optimizer in optimizers:
            isolated.run(optimizer, PARTS)
        return isolated.done
    files = [records.with_suffix(f".{job}.jsonl") for job in range(min(jobs, len(optimizers)))]
    common = [sys.executable, "-m", "benchmarks.gpu.isolated_parts", "--device", device.type]
    common += ["--seconds", str(seconds)]
    running = [
        subprocess.Popen(
            [*common, "--records", str(file), "--optimizers", *optimizers[job :: len(files)]]
        )
        for job, file in enumerate(files)
    ]
    for process in running:
        process.wait()
    lines = [line for file in files if file.is_file() for line in file.read_text().splitlines()]
    return [PartRecord(**json.loads(line)) for line in lines]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a check")
    arguments.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS)
    )
    arguments.add_argument("--records", type=Path, required=True, help="a JSON line for each part")
    arguments.add_argument("--jobs", type=int, default=1, help="processes that run optimizers")
    arguments.add_argument("--seconds", type=float, default=100.0, help="budget (default 100)")
    options = arguments.parse_args()
    device = torch.device(options.device)
    done = run_optimizers(
        device,
        options.optimizers,
        records=options.records,
        seconds=options.seconds,
        jobs=options.jobs,
    )
    if failures := [one.line() for one in done if one.result != "passed"]:
        print("\n".join(failures))
        raise SystemExit(f"{len(failures)} of {len(done)} parts have not passed: {failures[0]}")
    ran = {op for one in done for op in one.ops}
    if options.jobs == 1 and (not_run := sorted(wanted_ops(device) - ran)):
        raise SystemExit(f"ops that were not run: {', '.join(not_run)}")
    print(f"{len(done)} parts, {len(ran)} ops ran on {device}, results equal the CPU's")


if __name__ == "__main__":
    main()
