"""The limit of CPU seconds for tests that are not long, and the end of a run that says them."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import cpu_time
import pytest
from cpu_time import USUAL_S, cpu_seconds, slowness
from started import start_server

pytestmark = pytest.mark.cpu_only("files, which are the same for all devices")

TESTS = Path(__file__).resolve().parents[1]
FILE = """
import subprocess, sys, time
import pytest

pytestmark = pytest.mark.cpu_only("a test of pytest")
calls = []

def busy(seconds=0.1):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_slow():
    busy()

def test_slow_child():
    subprocess.run([sys.executable, "-c", "for i in range(3_000_000): pass"])

def test_slow_only_at_first():
    calls.append(1)
    busy(0.1 if len(calls) == 1 else 0.0)

@pytest.mark.long_cases("b")
@pytest.mark.parametrize("case", ["a", "b"])
def test_with_a_long_case(case):
    busy(0.1 if case == "b" else 0.0)
"""


ONCE = """
import pytest

pytestmark = pytest.mark.any_device
calls = []

def test_that_leaves_something_behind():
    calls.append(1)
    assert len(calls) == 1

def test_that_does_not():
    pass
"""


def run(folder: Path, output: Path, *more: str) -> None:
    sys.path.insert(0, str(TESTS))  # folders have a conftest, too
    os.getloadavg = lambda: (0.0, 0.0, 0.0)  # this machine may be busy
    cpu_time.slowness = lambda: 1.0  # or slow
    options = ["-c", str(TESTS.parent / "pyproject.toml"), "-p", "conftest"]
    options += ["-p", "no:cacheprovider", "-q", *(more or ("--cpu-limit", "0.05"))]
    with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        code = pytest.main([*options, str(folder)])
    sys.exit(code)


def test_time_of_an_ended_child_counts() -> None:
    before = cpu_seconds()
    used = "import time; print(sum(range(3_000_000)) and time.process_time())"
    child = subprocess.run([sys.executable, "-c", used], stdout=subprocess.PIPE, check=True)
    assert cpu_seconds() - before >= float(child.stdout) - 0.02  # of clock ticks


@pytest.mark.parametrize(("seconds", "times"), [(10 * USUAL_S, 10.0), (USUAL_S / 2, 1.0)])
def test_the_limit_is_for_a_machine_of_usual_speed(
    seconds: float, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, seconds])
    monkeypatch.setattr(cpu_time, "process_time", lambda: next(clock))
    assert slowness() == times


@pytest.mark.long
def test_a_test_that_takes_longer_fails_unless_it_is_long(tmp_path: Path) -> None:
    folder, output = tmp_path / "tests", tmp_path / "output.txt"
    folder.mkdir()
    (folder / "test_limited.py").write_text(FILE)
    process = start_server().Process(target=run, args=(folder, output))
    process.start()
    process.join(120)
    said = output.read_text()
    assert process.exitcode == pytest.ExitCode.TESTS_FAILED, said
    assert "3 passed" in said
    assert "2 failed" in said
    for name in ("test_slow", "test_slow_child"):
        assert f"test_limited.py::{name} took " in said
    assert " CPU seconds; without the marker long it may take 0.05" in said
    assert " s  " in said.partition("CPU seconds, ")[2]


@pytest.mark.long
def test_a_test_that_cannot_be_repeated_is_found(tmp_path: Path) -> None:
    folder, output = tmp_path / "tests", tmp_path / "output.txt"
    folder.mkdir()
    (folder / "test_once.py").write_text(ONCE)
    for more, said in (("--device=cpu", "2 passed"), ("--twice", "1 failed, 1 passed")):
        process = start_server().Process(target=run, args=(folder, output, more))
        process.start()
        process.join(120)
        assert said in output.read_text()
