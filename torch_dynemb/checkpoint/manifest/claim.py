"""The claim of a call that writes a checkpoint: other calls see it, and its end.

The folder in which a checkpoint is written has a file with a lock of the file system, and with the
process that holds it. The kernel gives the lock back when the process ends, however it ends. So a
folder with a file that is not locked is what a dead save left, and may be removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import weakref
from contextlib import suppress
from enum import Enum
from pathlib import Path

from torch_dynemb.checkpoint.entries import UNFINISHED

_MOST_BYTES = 4096  # of the file
_BEGUN = f"{UNFINISHED}.new"  # the file before it is locked
# No fork between the opening of a file and its place in this set. A child closes what it got: a
# lock lasts as long as any process has the file open.
_forking = threading.RLock()
_held: weakref.WeakSet[Claim] = weakref.WeakSet()


class Writer(Enum):
    """What is known of the call that made a folder."""

    NONE = "none"  # the folder is not one that a save makes
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"  # the file system has no locks


class Claim:
    """Claims a folder that this process writes; :meth:`release` ends it.

    Args:
        folder: that exists.

    Raises:
        FileNotFoundError: another call has taken the folder for one that a dead call has begun.
        OSError: the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._file: int | None = None
        new = folder / _BEGUN  # it gets its name when it is locked
        with _forking:
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                with suppress(OSError):  # a file system without locks
                    # remove_begun() of another call may have it for a moment
                    fcntl.flock(file, fcntl.LOCK_EX)
                who = {"process": os.getpid(), "host": socket.gethostname()}
                os.pwrite(file, json.dumps(who).encode(), 0)
                new.rename(folder / UNFINISHED)
            except BaseException:
                os.close(file)
                raise
            self._file = file
            _held.add(self)

    def release(self, *folders: Path) -> None:
        """End the claim.

        Args:
            *folders: where its file may be, which is removed there; a call that fails gives none,
                so that what it leaves is known to be left.
        """
        with _forking:
            file, self._file = self._file, None
            if file is None:
                return
            try:
                for folder in folders:
                    with suppress(OSError):
                        if os.path.samestat(os.lstat(folder / UNFINISHED), os.fstat(file)):
                            (folder / UNFINISHED).unlink()
            finally:
                os.close(file)

    def _forget(self) -> None:
        """In a forked child, which shares the lock but does not write."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def writer_of(folder: Path) -> tuple[Writer, str]:
    """Return what is known of the call that made a folder, and its process in words.

    Args:
        folder: that a save may have made.

    Raises:
        OSError: the file cannot be read.
    """
    with _forking:
        try:
            file = os.open(folder / UNFINISHED, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return Writer.NONE, ""
        try:
            who = _who(os.pread(file, _MOST_BYTES, 0))
            try:  # shared, so that several calls may ask at once
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Writer.ALIVE, who
            except OSError:
                return Writer.UNKNOWN, who
            return Writer.DEAD, who
        finally:
            os.close(file)


def remove_begun(folder: Path) -> None:
    """Remove a folder with nothing in it, or only the file of a claim that never began.

    A call that dies as it begins leaves one. A call that is alive and begins just now makes its
    folder again.

    Args:
        folder: with the name of an unfinished checkpoint.

    Raises:
        OSError: the folder cannot be read.
    """
    if not set(os.listdir(folder)) <= {_BEGUN}:
        return
    with _forking, suppress(OSError):  # it is locked, has got more, or is gone by now
        if os.listdir(folder):
            file = os.open(folder / _BEGUN, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / _BEGUN).unlink()
            finally:
                os.close(file)
        folder.rmdir()


def _who(text: bytes) -> str:
    try:
        content = json.loads(text)
        process, host = int(content["process"]), str(content["host"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
    if (process, host) == (os.getpid(), socket.gethostname()):
        return f"another thread of this process (pid {process} on {host})"
    return f"another process (pid {process} on {host})"


def _in_child() -> None:
    try:
        for claim in list(_held):
            claim._forget()
    finally:
        _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_in_child
    )

__all__ = ["Claim", "Writer", "remove_begun", "writer_of"]
