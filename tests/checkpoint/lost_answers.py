"""Calls of a disk or a store of which one goes wrong, also after it took effect."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from interrupting import interrupt

from torch_dynemb.files.disk import Disk

# fails before it took effect; takes effect, and then fails, meets Ctrl-C, or the process dies
HOWS = ("fails", "lost", "interrupted", "dies")


class Dead(BaseException):
    """The process is dead: no later call does anything."""


class Faults:
    """Counts calls, of which one goes wrong.

    Args:
        at: number of the call that goes wrong, from 1; 0: none.
        how: one of ``HOWS``.

    Attributes:
        seen: names of the calls.
    """

    def __init__(self, at: int = 0, how: str = "fails") -> None:
        self.seen: list[str] = []
        self._at, self._how, self._dead = at, how, False
        self._lock, self._inside = threading.Lock(), threading.local()

    def call(self, name: str, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if getattr(self._inside, "call", False):  # of a call that is counted
            return work(*arguments, **options)
        if self._dead:
            raise Dead
        with self._lock:
            self.seen.append(name)
            wrong = len(self.seen) == self._at
        if wrong and self._how == "fails":
            raise OSError(errno.EIO, "the call has failed")
        self._inside.call = True
        try:
            result = work(*arguments, **options)
        finally:
            self._inside.call = False
        if wrong and self._how == "lost":
            raise OSError(errno.EIO, "the answer is lost")
        if wrong and self._how == "interrupted":
            interrupt()
        if wrong and self._how == "dies":
            self._dead = True
            raise Dead
        return result


class FaultyCalls(Disk):
    """A local disk with faults. It does not wait until bytes are on the disk."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not hasattr(Disk, name):
            return found
        if name.startswith("sync"):
            found = _nothing
        if name == "close":
            os_close = found

            def found(file: int) -> None:
                os_close(file)  # as the end of a process does

        return lambda *arguments: self._faults.call(name, found, *arguments)


def _nothing(_: object) -> None:
    pass


class Store(LocalFileSystem):  # type: ignore[misc]
    """An object store in a folder: processes share it, and files appear as a whole."""

    protocol = ("bucket", "s3")  # as the latter, it needs no drafts
    cachable = False
    faults = Faults()

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).partition("://")[2].rstrip("/") if "://" in str(path) else str(path)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        def put() -> None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            whole = Path(f"{path}.{threading.get_ident()}")
            whole.write_bytes(value)
            whole.rename(path)

        self.faults.call("pipe_file", put)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Removes file by file, so that a part may be removed."""
        for file in self.find(path):
            self.rm_file(file)
        shutil.rmtree(path, ignore_errors=True)

    def rm_file(self, path: str) -> None:
        def remove() -> None:
            Path(path).unlink()
            if self.protocol == Store.protocol and not os.listdir(Path(path).parent):
                Path(path).parent.rmdir()  # an object store has no folders

        self.faults.call("rm_file", remove)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "wb":
            return super().open(path, mode, **options)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return _Upload(self.faults, path)


class Drafts(Store):
    """A store without whole PUTs, such as hdfs."""

    protocol = ("folders",)


class _Upload:
    """A file that is uploaded in parts."""

    def __init__(self, faults: Faults, path: str) -> None:
        self._faults, self._path, self._data = faults, Path(path), b""

    def write(self, data: bytes) -> int:
        def add() -> None:
            self._data += bytes(data)

        self._faults.call("write", add)
        return len(data)

    def close(self) -> None:
        self._faults.call("close", self._path.write_bytes, self._data)

    def discard(self) -> None:
        self._faults.call("discard", _nothing, None)


def _counted(name: str) -> Callable[..., Any]:
    def run(store: Store, *arguments: Any, **options: Any) -> Any:
        return store.faults.call(name, getattr(LocalFileSystem, name), store, *arguments, **options)

    return run


for _name in ("cat_file", "info", "find", "ls", "modified", "makedirs", "mv"):
    setattr(Store, _name, _counted(_name))
for _kind in (Store, Drafts):
    fsspec.register_implementation(_kind.protocol[0], _kind, clobber=True)


def url_of(kind: type[Store], path: Path) -> str:
    """The URL of a place in a store."""
    return f"{kind.protocol[0]}://{path}"


def age(folder: Path) -> None:
    """Makes files two days old."""
    then = time.time() - 2 * 86_400
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


def with_faults(
    faults: Faults, modules: Iterable[Any], job: Callable[[], object]
) -> type[BaseException] | None:
    """Run a job on faulty disks and stores; return the class of what it raised.

    Args:
        faults: of all calls.
        modules: those with the local disk of the job.
        job: work that saves something.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "faults", faults)
        for module in modules:
            patch.setattr(module, "_DISK", FaultyCalls(faults))
        try:
            job()
        except BaseException as error:  # not kept: its frames have the tables
            return type(error)
    return None
