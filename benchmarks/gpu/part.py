"""A part of gpu-check: programs one after another within a time budget, and a record of each.

What is known so far is on disk at every moment, so that a part that is killed leaves evidence.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
LATE = 124  # exit status of a program that was interrupted, as of timeout(1)
LEAST_SECONDS = 5.0  # a step that has less left is not begun
SAVE_EVERY = 20.0  # seconds
KILL_AFTER = 5.0  # seconds after the interrupt
LOG_BYTES = 64 << 20  # a program that prints more is interrupted
ARCHIVED_BYTES = 1 << 20  # of a log, from its end

PASSED, FINDINGS, FAILED, CUT, NOT_RUN = "passed", "findings", "failed", "cut", "not run"


@dataclass(frozen=True)
class Outcome:
    """Result of a step: one of the five words above, and why."""

    result: str
    reason: str = ""


Judge = Callable[[int, str], Outcome]


def last_line(text: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip(" =") for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "")[:300]


def by_status(status: int, text: str) -> Outcome:
    """Return the result of a program: status 0 has passed; the reason is its last line."""
    return Outcome(PASSED if status == 0 else FAILED, last_line(text))


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"gpu-check: {text}", flush=True)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of what is run: the repository's root on PYTHONPATH."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }


class Part:
    """Runner of steps, which keeps their record.

    Args:
        name: of the part.
        work: directory for logs and rows; emptied.
        out: directory for ``gpu-check-<name>.json`` and ``gpu-check-<name>.tar.gz``, which has all
            that is in ``work``.
        seconds: budget.
        about: keys for the summary: commit, device, versions.
    """

    def __init__(
        self, name: str, work: Path, out: Path, *, seconds: float, about: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.work = work
        self.summary: dict[str, Any] = {"part": name, **about, "steps": [], "kernels": {}}
        self._out = out
        self._end = time.monotonic() + seconds
        self.seconds = seconds
        self._saved = 0.0
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        out.mkdir(parents=True, exist_ok=True)
        self.save()

    def left(self) -> float:
        """Return seconds of the budget."""
        return self._end - time.monotonic()

    def record(self, step: str, outcome: Outcome, **facts: Any) -> Outcome:
        """Note the result of a step; the last note of a step counts."""
        steps = [one for one in self.summary["steps"] if one["step"] != step]
        steps.append({"step": step, "result": outcome.result, "reason": outcome.reason, **facts})
        self.summary["steps"] = steps
        self.save()
        return outcome

    def run(
        self,
        step: str,
        command: Sequence[str],
        *,
        seconds: float,
        judge: Judge = by_status,
        extra: Mapping[str, str] | None = None,
        quiet: bool = True,
    ) -> Outcome:
        """Run a program as a step, in the repository's root.

        A program that takes too long or prints too much is interrupted, as by Ctrl-C, and killed
        five seconds later. One that hangs in the driver even then is left behind.

        Args:
            step: name of the step, and of its log.
            command: program and arguments.
            seconds: time that it may take, if the part has as much left.
            judge: says from exit status and output what the run means.
            extra: further environment variables.
            quiet: print the end of the output only.

        Returns:
            What is recorded.
        """
        allowed = min(seconds, self.left())
        if allowed < LEAST_SECONDS:
            reason = f"the part's {self.seconds:.0f} s were used up"
            return self.record(step, Outcome(NOT_RUN, reason))
        say(f"{step} (at most {allowed:.0f} s): {' '.join(map(str, command))}")
        log = self.work / f"{step.replace(' ', '-')}.log"
        facts: dict[str, Any] = {"command": list(map(str, command)), "log": log.name}
        begin = time.monotonic()
        # what stands if this process is killed meanwhile
        self.record(step, Outcome(CUT, "gpu-check was killed during this step"), **facts)
        status = self._finish(command, log, allowed, environment(extra), quiet=quiet)
        outcome = judge(status, end_of(log).decode(errors="replace"))
        if status == LATE and outcome.result != FINDINGS:
            why = f"after {allowed:.0f} s"
            if log.stat().st_size > LOG_BYTES:
                why = f"because it printed more than {LOG_BYTES >> 20} MiB"
            outcome = Outcome(CUT, f"interrupted {why}: {outcome.reason}")
        facts |= {"status": status, "seconds": round(time.monotonic() - begin, 1)}
        say(f"{step}: {outcome.result}. {outcome.reason}")
        return self.record(step, outcome, **facts)

    def _finish(
        self,
        command: Sequence[str],
        log: Path,
        seconds: float,
        environ: Mapping[str, str],
        *,
        quiet: bool,
    ) -> int:
        """Wait for a program and return its status; save now and then."""
        try:
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=dict(environ),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            log.write_text(f"{command[0]} does not start: {error}\n")
            return 127
        end = time.monotonic() + seconds
        late = False
        printed = 0
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
                if not quiet:
                    printed = print_from(log, printed)
                if time.monotonic() - self._saved > SAVE_EVERY:
                    self.save()
                too_much = log.stat().st_size > LOG_BYTES and not late
                if process.returncode is None and (too_much or time.monotonic() > end):
                    signal_group(process, signal.SIGKILL if late else signal.SIGINT)
                    late = True
                    end = time.monotonic() + KILL_AFTER
        finally:  # also if a signal ends this process
            signal_group(process, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=KILL_AFTER)
        print_from(log, max(log.stat().st_size - 1500, 0) if quiet else printed)
        return LATE if late or process.returncode is None else process.returncode

    def save(self) -> None:
        """Write summary and archive; each is whole at every moment."""
        self._saved = time.monotonic()
        stem = f"gpu-check-{self.name}"
        text = json.dumps(self.summary, indent=1) + "\n"
        unfinished = self._out / f"{stem}.part"
        unfinished.write_text(text)
        unfinished.replace(self._out / f"{stem}.json")
        (self.work / "summary.json").write_text(text)
        with tarfile.open(unfinished, "w:gz") as archive:
            for path in sorted(self.work.rglob("*")):
                try:
                    data = end_of(path) if path.suffix == ".log" else path.read_bytes()
                except OSError:  # a directory, or what a running program has just removed
                    continue
                member = tarfile.TarInfo(f"{stem}/{path.relative_to(self.work)}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        unfinished.replace(self._out / f"{stem}.tar.gz")

    def table(self) -> list[str]:
        """Return a line for each step."""
        return [
            f"{step['step']:<20} {step['result']:<9} {step.get('seconds', 0):>6} s  "
            f"{step['reason']}"
            for step in self.summary["steps"]
        ]

    def bad(self) -> list[str]:
        """Return steps that failed or found something."""
        steps = self.summary["steps"]
        return [one["step"] for one in steps if one["result"] in (FAILED, FINDINGS)]


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a program and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def end_of(log: Path) -> bytes:
    """Return the end of a log, at most ARCHIVED_BYTES."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - ARCHIVED_BYTES, 0))
        return file.read(ARCHIVED_BYTES)


def print_from(log: Path, begin: int) -> int:
    """Print a log from a byte on; return its end."""
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read()
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
    return begin + len(text)
