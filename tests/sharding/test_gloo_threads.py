"""How the threads of gloo are scheduled in a process with a sharded model."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import gloo_thread_steps
import pytest
import torch.distributed as dist
from ranks import Ranks

from torch_dynemb.distributed import gloo_threads

pytestmark = [
    pytest.mark.cpu_only("TorchRec over gloo"),
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="/proc is missing"),
]


def test_those_that_receive_do_not_preempt(two_ranks: Ranks) -> None:
    results = two_ranks.run(gloo_thread_steps.policies_after_sharding, os.SCHED_OTHER)
    assert results == 2 * [({os.SCHED_BATCH}, os.SCHED_OTHER)]


def test_another_policy_is_kept(two_ranks: Ranks) -> None:
    results = two_ranks.run(gloo_thread_steps.policies_after_sharding, os.SCHED_IDLE)
    assert results == 2 * [({os.SCHED_IDLE}, os.SCHED_OTHER)]


def test_a_thread_may_end_meanwhile(two_ranks: Ranks) -> None:
    two_ranks.run(gloo_thread_steps.ended_thread)


def test_one_rank_leaves_them_alone(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tmp_path / str(threading.get_native_id())  # this thread, as if it received
    task.mkdir()
    (task / "comm").write_text("gloo_tcp_loop\n")
    monkeypatch.setattr(gloo_threads, "_TASKS", tmp_path)
    gloo_threads.let_senders_finish(dist.group.WORLD)
    gloo_threads.let_senders_finish(None)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
