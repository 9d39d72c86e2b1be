"""A storage thread that stands still in the middle of its work delays training, and changes no bit.

It waits in a call of the file system until the program lets it go, while that trains what is in
memory, prefetches what it wants, twice, and prefetches what it never looks up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import file_shim
import paused_training
import pytest

pytestmark = pytest.mark.cpu_only("stores on disks are the CPU's")

SECONDS = 300  # for a run of a few seconds: it has come to a deadlock


@pytest.fixture(scope="module")
def pauses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often the thread stood still in each case, all in one process."""
    root = tmp_path_factory.mktemp("paused")
    holds = [paused_training.hold_of(root, case) for case in paused_training.CASES]
    for hold in holds:
        hold.prefix.parent.mkdir()
    environment = file_shim.environment(root, holds=holds)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    program = [sys.executable, paused_training.__file__, str(root)]
    run = subprocess.run(
        program, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert run.returncode == 0, run.stderr[-4000:]
    counts: dict[str, int] = json.loads(run.stdout)
    return counts


@pytest.mark.parametrize("case", paused_training.CASES)
def test_training_goes_on_while_the_thread_stands_still(case: str, pauses: dict[str, int]) -> None:
    if case not in pauses:
        pytest.skip("this kernel, or this build, has no io_uring")
    assert pauses[case] >= 3
