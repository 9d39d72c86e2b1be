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
        result: dict[str, Any] = self._results["runs"][" ".join(options)]
        return result

    def run(self, options: Iterable[list[str]], *, at_once: int = 1) -> None:
        """Do the runs that are missing.

        Args:
            options: Of each run.
            at_once: Runs at a time.
        """
        missing = [o for o in options if " ".join(o) not in self._results["runs"]]
        with ThreadPoolExecutor(at_once) as pool:
            futures = {pool.submit(_run, [*o, *self._job]): " ".join(o) for o in missing}
            for future in as_completed(futures):
                self._results["runs"][futures[future]] = future.result()
                self._path.write_text(json.dumps(self._results, indent=1) + "\n")


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
