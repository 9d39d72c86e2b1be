"""Runs of the training job in processes of their own, each done once."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any


class JobRuns:
    """Results of runs that differ in some options, kept in a file.

    Args:
        path: The file, JSON. What it holds of the same job is not run again.
        job: Options that all runs have.
    """

    def __init__(self, path: Path, job: Sequence[str]) -> None:
        self._path, self._job = path, list(job)
        self._results: dict[str, Any] = {"job": self._job, "runs": {}}
        if path.exists() and (before := json.loads(path.read_text()))["job"] == self._job:
            self._results = before

    def __getitem__(self, options: Sequence[str]) -> dict[str, Any]:
        return self.of(options, 0)

    def of(self, options: Sequence[str], number: int) -> dict[str, Any]:
        """Return the result of a run, the first of which has number 0."""
        result: dict[str, Any] = self._results["runs"][_key(options, number)]
        return result

    def run(self, options: Iterable[list[str]], *, at_once: int = 1, rounds: int = 1) -> None:
        """Do the runs that are missing.

        Args:
            options: Of each run.
            at_once: Runs at a time.
            rounds: How often each is done, all of them in turn.
        """
        each = list(options)
        wanted = {_key(o, number): o for number in range(rounds) for o in each}
        missing = {key: o for key, o in wanted.items() if key not in self._results["runs"]}
        with ThreadPoolExecutor(at_once) as pool:
            futures = {pool.submit(_run, [*o, *self._job]): key for key, o in missing.items()}
            for future in as_completed(futures):
                self._results["runs"][futures[future]] = future.result()
                self._path.write_text(json.dumps(self._results, indent=1) + "\n")


def _key(options: Sequence[str], number: int) -> str:
    key = " ".join(options)
    return f"{key} # {number}" if number else key


def _run(options: list[str]) -> dict[str, Any]:
    """Run the job; return what it prints at its end."""
    print("train", *options, file=sys.stderr)
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run(
            [sys.executable, "-m", "tutorials.dlrm.train", *options, "--out", out],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        sys.exit(f"error: train {' '.join(options)}: {done.stderr.splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print("train", *options, json.dumps(result), file=sys.stderr)
    return result
