"""Lock on the folder that a save writes: other calls see whether that save still runs.

The folder contains a file with a lock of the file system and the process that holds it. The kernel
releases the lock when the process ends, in whatever way. So a folder with an unlocked file was left
by a dead save, and may be removed.
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

from torch_dynemb.files.disk import UNFINISHED

_MOST_BYTES = 4096  # size of the file
_BEGUN = f"{UNFINISHED}.new"  # the file before it is locked
# Taken between opening a file and adding its claim to the set below, so that no fork comes between.
# A child closes the files that it inherits: a lock lasts as long as any process has the file open.
_forking = threading.RLock()
_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


class Writer(Enum):
    """State of the call that created a folder."""

    NONE = "none"  # no save created the folder
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"  # the file system has no locks


class Claim:
    """Claim on a folder that this process writes; :meth:`release` ends it.

    Args:
        folder: the folder, which must exist.

    Raises:
        FileNotFoundError: another call took the folder for a dead save's, and removed it.
        OSError: the file cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self._file: int | None = None
        new = folder / _BEGUN  # renamed once it is locked
        with _forking:
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                with suppress(OSError):  # a file system without locks
                    # remove_begun() of another call may hold it for a moment
                    fcntl.flock(file, fcntl.LOCK_EX)
                owner = {"process": os.getpid(), "host": socket.gethostname()}
                os.pwrite(file, json.dumps(owner).encode(), 0)
                new.rename(folder / UNFINISHED)
            except BaseException:
                os.close(file)
                raise
            self._file = file
            _claims.add(self)

    def release(self, *folders: Path) -> None:
        """End the claim.

        Args:
            *folders: folders in which its file may be, and is removed. A failed call gives none, so
                that its folder is known to be left behind.
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
        """Close the file in a forked child, which shares the lock but does not write."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def writer_of(folder: Path) -> tuple[Writer, str]:
    """Return the state of the call that created a folder, and a description of its process.

    Args:
        folder: folder that a save may have created.

    Raises:
        OSError: the file cannot be read.
    """
    with _forking:
        try:
            file = os.open(folder / UNFINISHED, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return Writer.NONE, ""
        try:
            owner = _described(os.pread(file, _MOST_BYTES, 0))
            try:  # shared, so that several calls can test at once
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Writer.ALIVE, owner
            except OSError:
                return Writer.UNKNOWN, owner
            return Writer.DEAD, owner
        finally:
            os.close(file)


def remove_begun(folder: Path) -> None:
    """Remove a folder that is empty, or has only the file of a claim that never began.

    A call that dies at its start leaves one. A live call that is just starting creates its folder
    again.

    Args:
        folder: folder with the name of an unfinished checkpoint.

    Raises:
        OSError: the folder cannot be read.
    """
    if not set(os.listdir(folder)) <= {_BEGUN}:
        return
    with _forking, suppress(OSError):  # it is locked, has more files, or was removed meanwhile
        if os.listdir(folder):
            file = os.open(folder / _BEGUN, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / _BEGUN).unlink()
            finally:
                os.close(file)
        folder.rmdir()


def _described(text: bytes) -> str:
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
        for claim in list(_claims):
            claim._forget()
    finally:
        _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_in_child
    )

__all__ = ["Claim", "Writer", "remove_begun", "writer_of"]
