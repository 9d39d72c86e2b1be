"""Scheduling of the threads that gloo receives with."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

_RECEIVES = "gloo_tcp_loop"
"""Name of the thread that receives from other ranks."""

_TASKS = Path("/proc/self/task")


def let_senders_finish(process_group: dist.ProcessGroup | None) -> None:
    """Schedule gloo's receiving threads of this process as batch jobs.

    A thread that sends to a rank holds a lock until the system has taken all bytes. The thread that
    receives from that rank needs the lock, too, and polls for it while bytes are there. By default
    the system starts it when bytes arrive, even in place of the sender, and it polls for the
    sender's lock until its time slice ends. Linux's SCHED_BATCH starts it in turn, with an equal
    share of the processor. Any process may ask for it.

    Nothing changes in these cases: the group has one rank, or another backend than gloo; a thread
    has another scheduling policy already; the system refuses.

    Args:
        process_group: of the ranks; None: this process is alone.
    """
    if process_group is None or process_group.size() == 1 or not hasattr(os, "SCHED_BATCH"):
        return
    if "gloo" not in dist.get_backend(process_group) or not _TASKS.is_dir():
        return
    for task in _TASKS.iterdir():
        thread = int(task.name)
        with suppress(OSError):  # the thread has ended, or the system refuses
            if _name_of(task) == _RECEIVES and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _name_of(task: Path) -> str:
    return (task / "comm").read_text().rstrip("\n")


__all__ = ["let_senders_finish"]
