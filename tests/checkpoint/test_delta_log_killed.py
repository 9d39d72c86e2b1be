"""A process that SIGKILL ends while it publishes, and one that follows it all the time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import endless_publishes
import pytest
from endless_publishes import check, new_model

from torch_dynemb import checkpoint, delta_log
from torch_dynemb.delta_log.segment import Segment

pytestmark = pytest.mark.cpu_only("is about files, which know no device")


def kill_often(path: Path, times: int) -> None:
    """Kills processes that publish to one log, each after a time of its own."""
    rng = random.Random(7)
    program = subprocess.Popen(
        [sys.executable, endless_publishes.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # so that the process that it starts can be ended with it
    )
    assert program.stdin is not None
    assert program.stdout is not None
    model, follower = new_model(), None
    try:
        for turn in range(times):
            program.stdin.write(f"{path}\n")
            program.stdin.flush()
            child = int(program.stdout.readline())
            last = time.monotonic() + 120
            while not (path / "base").exists():
                assert time.monotonic() < last, "nothing was published"
                time.sleep(0.001)
            if follower is None:
                checkpoint.load(path / "base", model)
                follower = delta_log.follow(path, model)
            begun = follower.sequence or 0
            until = time.monotonic() + rng.random() * 0.1
            # it publishes, and this follows, before it is killed
            while (follower.sequence or 0) < begun + 2 or time.monotonic() < until:
                assert time.monotonic() < last, "nothing was published"
                if follower.update() > 0:
                    check(model, follower.sequence or 0)
            os.kill(child, signal.SIGKILL)
            assert program.stdout.readline() == "killed\n"
            follower.update()
            check(model, follower.sequence or 0)
            if turn % 3 == 2:  # the follower is killed, too, and starts anew
                model = new_model()
                assert delta_log.replay(path, model) == follower.sequence
                follower = delta_log.follow(path, model, sequence=follower.sequence)
                check(model, follower.sequence or 0)
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
    one_by_one = new_model()
    checkpoint.load(path / "base", one_by_one)
    follower = delta_log.follow(path, one_by_one)
    for number in range(1, (follower.sequence or 0) + 1):
        follower.update(until=number)
        check(one_by_one, number)


@pytest.mark.long
def test_killed_at_some_time(tmp_path: Path) -> None:
    kill_often(tmp_path / "log", 3)


@pytest.mark.long
def test_killed_at_fifty_times(tmp_path: Path) -> None:
    kill_often(tmp_path / "log", 50)
    segments = sorted((tmp_path / "log" / "r000-of-001").glob("*.delta"))
    assert len(segments) > 2
    for path in segments[:-1]:
        with Segment(path, last=False) as segment:
            assert all(segment.read(place) is not None for place in segment.heads())
