"""Work in forked processes with a watchdog: what hangs or faults there does not stop the others.

A fault of a kernel breaks CUDA for its whole process, and a hang in the driver may outlast SIGKILL.
So each process gets its CUDA context after the fork, and one that does not end is left behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch._dynamo  # noqa: F401  # seconds, which each fork would take for itself

SECONDS = 20.0  # between two messages
_END_SECONDS = 2.0  # for a process that has closed its pipe or was killed

Tell = Callable[[Mapping[str, Any]], None]


def run_isolated(
    work: Callable[[Tell], None],
    take: Callable[[dict[str, Any]], None],
    *,
    seconds: float = SECONDS,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Run work in a fork of this process, which must not have used CUDA.

    Args:
        work: gets a function that sends a message, a mapping that JSON can write.
        take: called here with each message when it comes.
        seconds: watchdog; each message winds it up again.
        environ: environment variables of the fork alone.

    Returns:
        Why the work did not end by itself; empty if it did.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _run_child(work, write, seconds, environ or {})
    os.close(write)
    try:
        in_time = _take_all(read, take, seconds)
    finally:
        os.close(read)
    if not in_time:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    status = _status(child)
    if not in_time:
        return f"hangs: nothing came for {seconds:g} s"
    if status is None:
        return "hangs at its end"
    code = os.waitstatus_to_exitcode(status)
    return "" if code == 0 else f"died with {'signal' if code < 0 else 'status'} {abs(code)}"


def _run_child(
    work: Callable[[Tell], None], write: int, seconds: float, environ: Mapping[str, str]
) -> None:
    status = 1
    try:
        os.environ.update(environ)

        def tell(message: Mapping[str, Any]) -> None:
            faulthandler.dump_traceback_later(0.8 * seconds, file=sys.__stderr__)
            data = (json.dumps(message) + "\n").encode()
            while data:
                data = data[os.write(write, data) :]

        faulthandler.dump_traceback_later(0.8 * seconds, file=sys.__stderr__)
        work(tell)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)  # nothing of the parent may end here a second time


def _take_all(read: int, take: Callable[[dict[str, Any]], None], seconds: float) -> bool:
    """Take messages until the pipe is closed; False: none came in time."""
    unfinished = b""
    end = time.monotonic() + seconds
    while select.select([read], [], [], max(end - time.monotonic(), 0))[0]:
        data = os.read(read, 1 << 20)
        if not data:
            return True
        *lines, unfinished = (unfinished + data).split(b"\n")
        for line in lines:
            take(json.loads(line))
        if lines:
            end = time.monotonic() + seconds
    return False


def _status(child: int) -> int | None:
    """Return how a process has ended; None: it has not."""
    end = time.monotonic() + _END_SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done or time.monotonic() > end:
            return status if done else None
        time.sleep(0.01)
