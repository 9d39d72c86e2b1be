"""Copies of a package in shared memory: runs read one, and one process of the machine changes them.

One copy is changed in place, row by row; processes read it without locks. Of two copies, runs lock
the one that they read, and the kernel ends the lock of a process that dies. Nothing waits for a
process that died.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from torch_dynemb.delta_log.follower import Follower
from torch_dynemb.delta_log.reader import LogReader
from torch_dynemb.delta_log.targets import nothing
from torch_dynemb.errors import NewBaseNeededError
from torch_dynemb.files.tensor_file import StoredTensor
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.serving.packages.loaded import Loaded
from torch_dynemb.serving.packages.manifest import PackageManifest
from torch_dynemb.serving.packages.memory import ConstantMemory
from torch_dynemb.serving.packages.shared_folder import SharedFolder, release
from torch_dynemb.serving.packages.shared_memory import SharedFile, SharedPosition, now
from torch_dynemb.serving.packages.versions import ServedPosition, Versions

Result = TypeVar("Result")
Make = Callable[[dict[str, StoredTensor]], ConstantMemory]
_all: weakref.WeakSet[SharedVersions] = weakref.WeakSet()


class SharedVersions(Versions):
    """The copies of a package that processes of a machine share.

    Args:
        place: directory for the files.
        manifest: of the package.
        fill: reads the package into memory that the given function makes.
        ready: gives a copy to the compiled code.
        copies: how many the writer wants; None: this process only reads.

    Raises:
        InUseError: another process is the writer.
        DamagedFileError: a file is damaged.
        DiskFullError, HostMemoryError: the constants do not fit.
    """

    def __init__(
        self,
        place: Path,
        manifest: PackageManifest,
        fill: Callable[[Make], object],
        ready: Callable[[ConstantMemory], Loaded],
        copies: int | None,
    ) -> None:
        self._folder, self._ready = SharedFolder(place, manifest), ready
        self._writer: int | None = None
        self._replaced: SharedFile | None = None  # until this writer has made a newer one
        self._reader: LogReader | None = None
        self._follower: Follower | None = None
        self._moving = 0  # threads that wait for the end of all runs
        self._pins: list[int] = []
        weakref.finalize(self, _close_all, self._pins).atexit = False

        def filled(copies: int) -> SharedFile:
            made: list[SharedFile] = []

            def make(stored: dict[str, StoredTensor]) -> ConstantMemory:
                made.append(SharedFile.create(self._folder, manifest, stored, copies))
                return made[0].copies[0]

            try:
                fill(make)
                return made[0].filled(writable=self._writer is not None)
            except BaseException:
                for draft in made:
                    draft.discard()
                raise

        with self._folder.starting():
            if copies is not None:
                self._writer = self._folder.lock_writer()
                # not at exit, when a thread may still be changing the tables
                self._unlock = weakref.finalize(self, release, self._writer)
                self._unlock.atexit = False
            try:
                file = SharedFile.open(self._folder, writable=self._writer is not None)
            except FileNotFoundError:
                file = filled(copies or 1)
                file.publish()
        if copies is not None and (file.changing or len(file.copies) != copies):
            # a writer died within a change: the counts of its tables cannot be trusted
            self._replaced, file = file, filled(copies)
        elif copies == 2:
            file.copy_active()  # a writer may have died while it changed the other one
        self._folder.remove_others()
        super().__init__([ready(memory) for memory in file.copies])
        self._take(file)
        _all.add(self)

    def _take(self, file: SharedFile) -> None:
        """Use a file, the copies of which are ready."""
        self._file = file
        _close_all(self._pins)
        if len(self._copies) == 2:
            self._pins += [self._folder.open_copy(number) for number in range(2)]
        self._running = [0] * len(self._copies)

    @property
    def start(self) -> SharedPosition:
        """Position from which the writer goes on."""
        return self._file.position(self._file.active)

    def follow(self, reader: LogReader, follower: Follower) -> None:
        """Take the position of each commit from a follower, in the process of the writer.

        If a writer died within a change, this applies all available commits to new tables, which
        then replace those that processes read.

        Raises:
            NewBaseNeededError: the log lacks commits that processes have seen; they keep the
                tables that they have.
        """
        self._reader, self._follower = reader, follower
        self._behind_at_start = self.start.dense_behind
        if self._replaced is None:
            return
        seen = self._replaced.position(self._replaced.active).sequence
        try:
            follower.update()
            if seen is not None and (reader.sequence is None or reader.sequence < seen):
                raise NewBaseNeededError(
                    f"serving.load: processes have read commit {seen} from {self._folder.path}, "
                    f"but the log leads to {reader.sequence}: they keep their tables. Export a "
                    "new package"
                )
        except BaseException:
            self._file.discard()
            raise
        self._file.publish()
        self._replaced = None

    def position(self) -> ServedPosition:
        """Return the position of the copy that runs now."""
        with self._ended:
            if sum(self._running) == 0:
                self._follow_file()
            at = self._file.position(self._file.active)
            age = (now() - at.committed_at) / 1e9 if at.committed_at else None
            return ServedPosition(at.sequence, at.dense_behind, age, len(self._copies) == 2)

    def reading(self) -> AbstractContextManager[Loaded]:
        """Yield the copy that runs read now; one of two does not change meanwhile."""
        return self._reading()

    @contextmanager
    def _reading(self) -> Iterator[Loaded]:
        with self._ended:
            self._follow_file()
            number = self._pin()
        try:
            yield self._copies[number]
        finally:
            with self._ended:
                self._unpin(number)
                if self._moving:
                    self._ended.notify_all()

    def _pin(self) -> int:
        """Lock the active copy against changes, and return its number."""
        while True:
            number = self._file.active
            if self._pins and self._running[number] == 0:
                try:
                    fcntl.flock(self._pins[number], fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # the writer changes it, so it has stopped being the active one
            self._running[number] += 1
            if number == self._file.active:
                return number
            self._unpin(number)

    def _unpin(self, number: int) -> None:
        self._running[number] -= 1
        if self._pins and self._running[number] == 0:
            fcntl.flock(self._pins[number], fcntl.LOCK_UN)

    def _follow_file(self) -> None:
        """Move to the file that a new writer has put in the place of this one."""
        if self._writer is not None or self._file.is_current:
            return
        self._moving += 1
        self._ended.wait_for(lambda: sum(self._running) == 0)
        self._moving -= 1
        if self._file.is_current:  # another thread has moved
            return
        file = SharedFile.open(self._folder, writable=False)
        self._copies.clear()  # gives the compiled code back
        try:
            self._copies += [self._ready(memory) for memory in file.copies]
        except BaseException:
            self._copies = [self._ready(memory) for memory in self._file.copies]
            raise
        self._take(file)

    def change(
        self, make: Callable[[Loaded], Result], made: Callable[[], object] = nothing
    ) -> Result:
        """Change the copy that later runs of all processes read; see :meth:`Versions.change`.

        Raises:
            RuntimeError: this process only reads.
            InUseError: with two copies, a process does not end a run of the one to be changed.
        """
        if self._writer is None:
            raise RuntimeError(
                "ServedModel: this process only reads the tables in shared_memory: the process "
                "with follow= changes them"
            )
        with self._changing:
            if len(self._copies) == 1:
                with defer_signals():
                    self._file.changing = True
                    try:
                        result = make(self._copies[0])
                        made()
                        self._note(0)
                    finally:
                        self._file.changing = False
                return result
            other = 1 - self._file.active
            copy = self._copies[other]
            with self._folder.alone(other), defer_signals():
                if self._behind is not None:
                    self._behind(copy)
                    self._behind = None
                result = make(copy)
                self._behind = make
                made()
                self._note(other)
            self._file.active = other  # its lock is free: runs that see this can take it
            return result

    def _note(self, number: int) -> None:
        """Give a copy the position that the follower has reached."""
        if self._reader is None or self._follower is None or not self._reader.chains:
            return
        sequence, before = self._reader.sequence, self._file.position(self._file.active)
        rank, chain = next(iter(self._reader.chains.items()))
        behind = self._behind_at_start + self._follower.dense_behind
        at = before.committed_at if sequence == before.sequence else now()
        self._file.set_position(number, SharedPosition(sequence, rank, chain, behind, at))

    def _in_child(self) -> None:
        """Make this a reader of its own after a fork."""
        self._ended, self._changing = threading.Condition(), threading.Lock()
        if self._writer is not None:
            self._unlock.detach()
            os.close(self._writer)
            self._writer = None
        self._take(self._file)


def _close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def _forked() -> None:
    for versions in list(_all):
        versions._in_child()


os.register_at_fork(after_in_child=_forked)

__all__ = ["SharedVersions"]
