"""The folder with which processes share the constants of a package, and its locks.

All locks are those of the kernel (flock), which ends them when a process dies:

    start           exclusive: a process creates or removes files here
    constants       shared: a process maps this file
    writer          exclusive: a process changes the constants; the file has its pid
    copy0, copy1    shared: a process runs this copy; exclusive: the writer changes it
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch_dynemb.errors import InUseError
from torch_dynemb.serving.packages.manifest import PackageManifest, manifest_text

_PREFIX = "torch_dynemb-"
_START, _CONSTANTS, _WRITER = "start", "constants", "writer"
_COPY, _DRAFT = "copy", "draft-"
_FORMAT_VERSION = 1  # of the file and of live tables; other versions have other folders
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PATIENCE = 60.0  # seconds that a writer waits for runs of a copy
_LONGEST_PAUSE = 0.01  # seconds


class SharedFolder:
    """Folder of a package's constants; made by the first process that starts.

    Args:
        place: directory that the user has given.
        manifest: of the package. Each package has a folder of its own, so rows of another one are
            never taken.

    Attributes:
        path: of the folder.
        constants: path of the file that processes map.
    """

    def __init__(self, place: Path, manifest: PackageManifest) -> None:
        # files on a disk that outlive the system may lack what was not written back
        content = manifest_text(manifest) + bytes([_FORMAT_VERSION]) + _BOOT.read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:16]
        self.path = place / f"{_PREFIX}{manifest.uuid}-{digest}"
        self.constants = self.path / _CONSTANTS

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Hold the lock under which files are created and removed; create the folder.

        Raises:
            FileNotFoundError: the place does not exist.
            PermissionError: another user has made the folder.
        """
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            if (owner := self.path.stat().st_uid) not in (0, os.geteuid()):
                raise PermissionError(
                    f"serving.load: {self.path} belongs to user {owner}, and its content cannot be "
                    "trusted: give another shared_memory="
                )
            with _locked(self.path) as held:
                if held:
                    yield
                    return

    def draft(self) -> Path:
        """Return a path for a new file, and remove those of processes that died."""
        for old in self.path.glob(f"{_DRAFT}*"):
            _unlink_unused(old)
        return self.path / f"{_DRAFT}{uuid.uuid4().hex}"

    def lock_writer(self) -> int:
        """Return an open file with the lock of the writer.

        Raises:
            InUseError: another process has it.
        """
        file = os.open(self.path / _WRITER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _lock(file, fcntl.LOCK_EX, wait=False):
            pid = os.pread(file, 32, 0).decode(errors="replace") or "unknown"
            os.close(file)
            raise InUseError(
                f"serving.load: process {pid} follows a delta log for the tables in {self.path}: "
                "one process may. Load without follow=, and read its updates",
                path=self.path,
            )
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        return file

    def open_copy(self, number: int) -> int:
        """Return an open file for locks of a copy of the constants."""
        return os.open(
            self.path / f"{_COPY}{number}", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600
        )

    @contextmanager
    def alone(self, number: int) -> Iterator[None]:
        """Hold a copy for a change, while no process runs it.

        Raises:
            InUseError: a run does not end.
        """
        file = self.open_copy(number)
        try:
            last, pause = time.monotonic() + _PATIENCE, 1e-4
            while not _lock(file, fcntl.LOCK_EX, wait=False):
                if time.monotonic() > last:
                    raise InUseError(
                        f"follow: processes {_owners(file)} have run an earlier version of "
                        f"{self.path} for {_PATIENCE:.0f} seconds: nothing has changed. End "
                        "them, or update again when these runs have ended",
                        path=self.path,
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            yield
        finally:
            release(file)

    def remove_others(self) -> None:
        """Remove the folders of other packages that no process uses, as killed ones leave them."""
        for folder in self.path.parent.glob(f"{_PREFIX}*"):
            if folder != self.path:
                remove_unused(folder, tries=1)


def remove_unused(folder: Path, tries: int = 20) -> None:
    """Remove the folder of a package unless a process uses it.

    Args:
        folder: the folder.
        tries: how often to try to lock the folder. Other processes that end hold it for a moment; a
            process that starts holds it for long, and will use the folder.
    """
    with suppress(OSError), _locked(folder, tries=tries) as held:
        if not held or not _unlink_unused(folder / _CONSTANTS):
            return
        drafts = [_unlink_unused(draft) for draft in folder.glob(f"{_DRAFT}*")]
        if all(drafts):
            for name in (_WRITER, f"{_COPY}0", f"{_COPY}1", _START):
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()


def _unlink_unused(path: Path) -> bool:
    """Remove a file unless a process has a lock on it; return whether it is gone."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        unused = _lock(file, fcntl.LOCK_EX, wait=False)
        if unused:
            path.unlink()
        return unused
    finally:
        release(file)


@contextmanager
def _locked(folder: Path, *, tries: int | None = None) -> Iterator[bool]:
    """Lock a folder; yield False if it was removed meanwhile, or is locked. No ``tries``: wait."""
    try:
        file = os.open(folder / _START, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        yield False
        return
    try:
        held = tries is None and _lock(file, fcntl.LOCK_EX, wait=True)
        for _ in range(tries or 0):
            if held := _lock(file, fcntl.LOCK_EX, wait=False):
                break
            time.sleep(_LONGEST_PAUSE)
        yield held and _same(folder / _START, file)
    finally:
        release(file)


def _lock(file: int, kind: int, *, wait: bool) -> bool:
    """Lock a file; return False if another process has it locked, and ``wait`` is False."""
    try:
        fcntl.flock(file, kind | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def release(file: int) -> None:
    """End the lock of a file, also for processes that were forked meanwhile, and close it."""
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _same(path: Path, file: int) -> bool:
    """Return whether a path still leads to an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _owners(file: int) -> str:
    """Return the pids with a lock on a file, as far as the system shows them."""
    inode = f":{os.fstat(file).st_ino}"
    with suppress(OSError):
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        pids = {line[4] for line in lines if line[1] == "FLOCK" and line[5].endswith(inode)}
        return ", ".join(sorted(pids)) or "unknown"
    return "unknown"


__all__ = ["SharedFolder", "release", "remove_unused"]
