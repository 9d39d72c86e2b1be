"""Row stores under ThreadSanitizer, by a program of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import thread_checked

pytestmark = [pytest.mark.cpu_only("files and threads, and no tables"), pytest.mark.long]


def test_no_two_threads_meet_in_a_store(tmp_path: Path) -> None:
    reply = thread_checked.run(thread_checked.build(), tmp_path, thread_checked.STEPS)
    assert (reply.returncode, reply.stderr) == (0, ""), reply.stderr
    assert len(reply.stdout.splitlines()) == 2  # each way of reading files
