"""User and system time of a program with all processes that it starts.

``python cpu_time.py COMMAND...`` runs a command and prints that time and its output as JSON, in a
process of its own, which adopts and waits for whatever the command leaves behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Ended(NamedTuple):
    """A program that has ended.

    Attributes:
        seconds: of user and system time.
        output: what it has written to stdout.
    """

    seconds: float
    output: str


def run_counted(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Ended:
    """Run a program in a folder to its end and count its time.

    Raises:
        RuntimeError: with the end of stderr, if the program fails.
    """
    done = subprocess.run(
        [sys.executable, __file__, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-2000:]}")
    return Ended(**json.loads(done.stdout))


def main() -> None:
    # A process that outlives its parent, such as the one that ranks are forks of, becomes a child
    # of this one: the time of children is only known when they have been waited for.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, text=True, check=False)
    while _wait_for_a_child():
        pass
    if done.returncode != 0:
        sys.exit(1)
    times = os.times()
    spent = times.children_user + times.children_system
    print(json.dumps(Ended(spent, done.stdout)._asdict()))


def _wait_for_a_child() -> bool:
    try:
        os.wait()
    except ChildProcessError:  # there are none left
        return False
    return True


if __name__ == "__main__":
    main()
