"""How the threads that gloo receives with are scheduled."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

_RECEIVES = "gloo_tcp_loop"
"""Name of the thread that waits for what comes from other ranks."""

_TASKS = Path("/proc/self/task")


def let_senders_finish(process_group: dist.ProcessGroup | None) -> None:
    """Has the threads of this process that receive by gloo wait until a processor is free.

    A thread that sends to a rank holds a lock until the system has taken all bytes. The one that
    receives from that rank needs the lock, too, and asks again and again while bytes are there. By
    default it is started at once when bytes arrive, also in place of the sender, whose lock it then
    asks for until its time is up. Linux's SCHED_BATCH starts it when its turn comes, with an equal
    share of the processor, and any process may ask for it.

    Nothing changes where the group has no other ranks or gloo is not its backend, where somebody
    has chosen another scheduling policy, or where the system refuses.

    Args:
        process_group: of the ranks; None: this process is on its own.
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
