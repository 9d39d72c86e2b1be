"""Processes that tests fork and kill: a fork has the libraries, and begins within milliseconds."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_PR_SET_PDEATHSIG = 1


def forked(work: Callable[[], object]) -> int:
    """Return the pid of a process that works and then ends, at the latest with this one."""
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            torch.set_num_threads(1)  # those of OpenMP have not come along: it would wait for them
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid


def ended(pid: int) -> int:
    """Wait for a process. Return its status: 0, or less the number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at(line: int, files: tuple[str, ...]) -> None:
    """Kill this process when it has run so many lines of files.

    Args:
        line: number of the line, in the order in which lines run.
        files: ends of their paths.
    """
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


__all__ = ["ended", "forked", "kill_at"]
