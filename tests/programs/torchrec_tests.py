"""TorchRec's own tests on CPUs, with static or dynamic tables.

    python tests/programs/torchrec_tests.py FOLDER {static,dynamic} [PATTERN ...] [--json FILE]

FOLDER has `torchrec/distributed/tests/*.py` of TorchRec's repository, which its wheels lack, and
may have `torchrec/distributed/train_pipeline/tests/*.py`. A line is printed for each test, and the
numbers by outcome. PATTERN is part of the name of a test.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torchrec_config

if __name__ != "__main__" and "TORCHREC_TESTS" in os.environ:
    torchrec_config.install_as_parent()  # a process of a test

HANGS_S = 900  # a test of the longest takes 200 s of an idle core


def cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for of in suite:
        if isinstance(of, unittest.TestSuite):
            yield from cases(of)
        else:
            yield of


def found(folder: Path, patterns: list[str]) -> list[unittest.TestCase]:
    """Tests of a folder by name."""
    chosen = []
    for file in sorted(folder.glob("torchrec/distributed/**/tests/test_*.py")):
        with contextlib.ExitStack() as gpus:
            gpus.enter_context(torchrec_config.many_gpus())
            if "train_pipeline" in file.parts:  # its tests ask for a GPU and need none
                gpus.enter_context(mock.patch("torch.cuda.is_available", return_value=True))
            name = ".".join(file.relative_to(folder).with_suffix("").parts)
            module = importlib.import_module(name)
        for case in cases(unittest.defaultTestLoader.loadTestsFromModule(module)):
            if not patterns or any(pattern in case.id() for pattern in patterns):
                chosen.append(case)
    return chosen


def _hangs(*_: Any) -> None:
    raise TimeoutError(f"the test has not ended after {HANGS_S} s")


def outcome(case: unittest.TestCase) -> tuple[str, str]:
    """How a test ends: "passed", "skipped" or "failed", and why."""
    result = unittest.TestResult()
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(HANGS_S)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            case.run(result)
    finally:
        signal.alarm(0)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    failures = result.failures + result.errors
    return ("failed", failures[0][1]) if failures else ("passed", "")


def reason(text: str) -> str:
    """The last error of a rank in the text of a failure, or its last line."""
    ranks = re.findall(r"^RuntimeError: Worker raised (.*)$", text, re.M)
    lines = [line for line in text.splitlines() if line.strip()]
    return (ranks or lines or [""])[0 if ranks else -1][:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tables", choices=(torchrec_config.STATIC, torchrec_config.DYNAMIC))
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--json", type=Path, help="a file that gets the outcome of each test")
    arguments = parser.parse_args()
    temporary = tempfile.TemporaryDirectory(prefix="torchrec_tests_")
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = temporary.name
    counts = Path(temporary.name, "counts")
    torchrec_config.environment(arguments.folder.resolve(), arguments.tables, counts)
    torchrec_config.install_as_parent()
    # ranks fork from a process with TorchRec and the patches
    multiprocessing.set_forkserver_preload([Path(__file__).stem])
    done: dict[str, dict[str, Any]] = {}
    for case in found(arguments.folder, arguments.patterns):
        name = case.id().removeprefix("torchrec.distributed.")
        counts.write_text("")
        began = time.monotonic()
        how, why = outcome(case)
        done[name] = {
            "outcome": how,
            "why": why,
            "seconds": round(time.monotonic() - began, 1),
            "dynamic tables": max(map(int, counts.read_text().split()), default=0),
        }
        numbers = f"{done[name]['seconds']:7.1f} s {done[name]['dynamic tables']:3} dynamic"
        print(f"{how:8}{numbers}  {name}  {reason(why)}", flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(done, indent=1) + "\n")
    temporary.cleanup()
    print(arguments.tables, dict(Counter(of["outcome"] for of in done.values())))
    sys.exit(any(of["outcome"] == "failed" for of in done.values()))


if __name__ == "__main__":
    main()
