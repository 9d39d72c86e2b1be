"""What the ranks of test_gloo_threads do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from sharded_models import Table, sharded

import torch_dynemb as td
from torch_dynemb.distributed import gloo_threads

_TASKS = Path("/proc/self/task")


def receiving() -> list[int]:
    """The threads of this process that receive by gloo."""
    named = {int(task.name): (task / "comm").read_text().strip() for task in _TASKS.iterdir()}
    return [thread for thread, name in named.items() if name == "gloo_tcp_loop"]


def _schedule(policy: int) -> None:
    for thread in receiving():
        os.sched_setscheduler(thread, policy, os.sched_param(0))


def policies_after_sharding(rank: int, before: int) -> tuple[set[int], int]:
    """Policies of the threads that receive, and of this one, after a model was sharded.

    Args:
        before: the policy of the former until then.
    """
    _schedule(before)
    try:
        sharded((Table("rows", 8, ("a",), sharding="row_wise"),), optimizer=td.SGD(lr=0.1))
        return {os.sched_getscheduler(thread) for thread in receiving()}, os.sched_getscheduler(0)
    finally:
        _schedule(os.SCHED_OTHER)


def ended_thread(rank: int) -> None:
    """A thread may end while it is inspected."""
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / str(2**30)  # above the largest number of a thread
        task.mkdir()
        (task / "comm").write_text("gloo_tcp_loop\n")
        (Path(folder) / str(2**30 + 1)).mkdir()  # its name is gone
        with mock.patch.object(gloo_threads, "_TASKS", Path(folder)):
            gloo_threads.let_senders_finish(dist.group.WORLD)
