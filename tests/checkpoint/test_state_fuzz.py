"""Saved states changed at random: refused, or as good as any; in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("a program, in a process of its own")

PROGRAM = Path(__file__).parent / "state_fuzz.py"
LIMIT = 600  # seconds, after which it hangs


def run(first: int, last: int) -> int:
    """Loads so many changed states; returns how many were taken."""
    reply = subprocess.run(
        [sys.executable, str(PROGRAM), str(first), str(last)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert reply.returncode == 0, reply.stdout[-300:] + reply.stderr[-3000:]
    return int(reply.stdout.splitlines()[-1].split()[0])


@pytest.mark.long
def test_changed_states_are_refused_or_train() -> None:
    assert 10 < run(0, 150) < 140


@pytest.mark.long
@pytest.mark.parametrize("first", range(150, 10_150, 1000))
def test_many_changed_states_are_refused_or_train(first: int) -> None:
    assert 100 < run(first, first + 1000) < 900
