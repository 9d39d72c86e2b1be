"""A file with the constants of a package that several processes map, so that memory has them once.

    magic 8 | bytes of the description 4 | crc32c of it 4 | description, JSON | zeros to a page

    state   a page of int64: the copy that runs, whether a change has begun, position of each copy

    copy    tables | zeros to a page | dense state | zeros to a page, once or twice

The file is made under another name and renamed, so it is complete. Afterwards the writer alone
changes it: words of the state, and rows as ``csrc/cpu/serving/live_writer.h`` does.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import struct
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_dynemb import ops
from torch_dynemb.errors import DamagedFileError, DiskFullError
from torch_dynemb.files.bounded_json import parsed
from torch_dynemb.files.checksummed_files import checksum_of_bytes
from torch_dynemb.files.tensor_file import StoredTensor
from torch_dynemb.serving.packages.manifest import DENSE, PackageManifest
from torch_dynemb.serving.packages.memory import ALIGNMENT, ConstantMemory, tensor_at, too_large
from torch_dynemb.serving.packages.shared_folder import SharedFolder, release, remove_unused

_MAGIC = b"dynembSM"
_HEAD = struct.Struct("<8sII")
_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 2 << 20  # of file systems that are mounted with huge=always
_HUGE_PAGES_FROM = 64 << 20  # of a copy; below, what is rounded up would be much of it
_ACTIVE, _CHANGING = 0, 1  # words of the state
_FIRST_POSITION, _POSITION_WORDS = 8, 8  # of a copy
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10


class SharedPosition(NamedTuple):
    """Position in a delta log that a copy of the constants has.

    Attributes:
        sequence: number of its last commit; None: its rows are those of the base.
        rank, chain: of a batch of this commit, see ``PackageBase``.
        dense_behind: number of commits that it lacks the dense state of.
        committed_at: ``time.monotonic_ns()`` when the commit was applied; 0: at the export.
    """

    sequence: int | None
    rank: int
    chain: int
    dense_behind: int = 0
    committed_at: int = 0


class _Layout(NamedTuple):
    """Description in the file: offsets in bytes; dtype, shape and offset in a copy by name."""

    copies: int
    copy_bytes: int
    dense_begin: int
    tensors: dict[str, tuple[str, list[int], int]]


class SharedConstants(ConstantMemory):
    """A copy of the constants, mapped from the file. Writing is an error unless ``writable``.

    Args:
        file: open file.
        begin: offset of the copy.
        layout: of the file.
        writable: whether this process is the writer.
        draft: whether this process fills the file.
    """

    def __init__(
        self, file: int, begin: int, layout: _Layout, *, writable: bool, draft: bool
    ) -> None:
        size, dense = layout.copy_bytes, layout.dense_begin
        both = mmap.PROT_READ | mmap.PROT_WRITE
        protection = both if writable else mmap.PROT_READ
        self._first = _mapped(None, size, protection, mmap.MAP_SHARED, file, begin)
        self._end = self._first + size
        weakref.finalize(self, _libc.munmap, self._first, size).atexit = False
        if layout.copies == 1 and size > dense and not draft:
            # nothing follows it, and a model may change buffers of its own: a page that is written
            # becomes this process's
            fixed = mmap.MAP_PRIVATE | _MAP_FIXED
            _mapped(self._first + dense, size - dense, both, fixed, file, begin + dense)
        self.tensors = {
            name: tensor_at(self._first + at, StoredTensor(getattr(torch, dtype), tuple(shape), at))
            for name, (dtype, shape, at) in layout.tensors.items()
        }

    def copy_from(self, other: SharedConstants) -> None:
        """Take all bytes of another copy."""
        ctypes.memmove(self._first, other._first, self._end - self._first)


class SharedFile:
    """The mapped file. Its end removes the folder if no other process uses that.

    Args:
        folder: of the package.
        path: of the file; its own one, or a draft.
        file: open file, with a shared lock; closed at the end.
        writable: whether this process is the writer.
        draft: whether this process fills the file.

    Attributes:
        folder: see the argument.
        copies: of the constants.

    Raises:
        DamagedFileError: the file was cut off, or is another one.
    """

    def __init__(
        self,
        folder: SharedFolder,
        path: Path,
        file: int,
        *,
        writable: bool,
        draft: bool = False,
    ) -> None:
        self.folder, self._path = folder, path
        weakref.finalize(self, _close, file, None if draft else folder.path, os.getpid())
        self._name = str(folder.constants)
        self._inode = os.fstat(file).st_ino
        layout, begin = _layout_of(path, file)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        page = mmap.mmap(file, _PAGE, mmap.MAP_SHARED, protection, offset=begin)
        self._words = memoryview(page).cast("q")
        begin = _file_bytes(begin, layout._replace(copies=0))
        self.copies = [
            SharedConstants(
                file, begin + number * layout.copy_bytes, layout, writable=writable, draft=draft
            )
            for number in range(layout.copies)
        ]

    @classmethod
    def open(cls, folder: SharedFolder, path: Path | None = None, *, writable: bool) -> SharedFile:
        """Open the file of a folder, or a draft.

        Raises:
            FileNotFoundError: it does not exist.
            DamagedFileError: it was cut off, or is another one.
        """
        path = path or folder.constants
        file = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        fcntl.flock(file, fcntl.LOCK_SH)
        return cls(folder, path, file, writable=writable)

    @classmethod
    def create(
        cls,
        folder: SharedFolder,
        manifest: PackageManifest,
        stored: Mapping[str, StoredTensor],
        copies: int,
    ) -> SharedFile:
        """Make a draft of zeros; :meth:`publish` gives it its name.

        Args:
            folder: of the package.
            manifest: of the package.
            stored: dtype and shape of its tensors.
            copies: how many.

        Raises:
            HostMemoryError: memory is short.
            DiskFullError: the file system is full.
        """
        dense = {name for name, file in manifest.constants.items() if file == DENSE}
        tensors: dict[str, tuple[str, list[int], int]] = {}
        dense_begin = _place(tensors, stored, stored.keys() - dense, 0)
        size = _place(tensors, stored, dense, dense_begin)
        layout = _Layout(copies, _whole(max(size, _PAGE)), dense_begin, tensors)
        text = json.dumps(layout._asdict()).encode()
        head = _HEAD.pack(_MAGIC, len(text), checksum_of_bytes(text)) + text
        whole = _file_bytes(len(head), layout)
        if whole > (free := ops.available_memory()):
            raise too_large(whole, f"{free} bytes of memory are free")
        path = folder.draft()
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            # all of it now: a page that is missing later would kill the process that touches it
            os.posix_fallocate(file, 0, whole)
            os.pwrite(file, head, 0)
        except OSError as error:
            path.unlink()
            os.close(file)
            if error.errno not in _FULL:
                raise
            space = os.statvfs(folder.path)
            raise DiskFullError(
                error.errno,
                f"{os.strerror(error.errno)}: the constants take {whole} bytes, and "
                f"{space.f_bavail * space.f_frsize} bytes are free in shared_memory: make that "
                "file system larger, raise the limit of the size of files (ulimit -f), or load "
                "without shared_memory=",
                str(folder.path.parent),
            ) from error
        made = cls(folder, path, file, writable=True, draft=True)
        base = manifest.base
        at = SharedPosition(None, -1, 0)
        if base is not None and base.sequence is not None:
            at = SharedPosition(base.sequence, base.rank, base.chain)
        for number in range(copies):
            made.set_position(number, at)
        return made

    def filled(self, *, writable: bool) -> SharedFile:
        """Return a draft as processes use it, now that it has its content."""
        for copy in self.copies[1:]:
            copy.copy_from(self.copies[0])
        return SharedFile.open(self.folder, self._path, writable=writable)

    def publish(self) -> None:
        """Give a draft its name; processes that map an earlier file see that it is not current."""
        self._path.rename(self.folder.constants)
        self._path = self.folder.constants

    def discard(self) -> None:
        """Remove a draft."""
        self._path.unlink()

    @property
    def is_current(self) -> bool:
        """Whether no other file has taken its name."""
        try:
            return os.stat(self._name).st_ino == self._inode
        except FileNotFoundError:
            return True

    @property
    def active(self) -> int:
        """Number of the copy that runs."""
        return self._words[_ACTIVE]

    @active.setter
    def active(self, number: int) -> None:
        self._words[_ACTIVE] = number

    @property
    def changing(self) -> bool:
        """Whether a change of a single copy has begun; a writer that died has not ended it."""
        return self._words[_CHANGING] != 0

    @changing.setter
    def changing(self, begun: bool) -> None:
        self._words[_CHANGING] = int(begun)

    def position(self, number: int) -> SharedPosition:
        """Return the position of a copy."""
        first = _FIRST_POSITION + number * _POSITION_WORDS
        sequence, *others = self._words[first : first + len(SharedPosition._fields)]
        return SharedPosition(None if sequence < 0 else sequence, *others)

    def set_position(self, number: int, position: SharedPosition) -> None:
        """Set the position of a copy."""
        sequence, *others = position
        first = _FIRST_POSITION + number * _POSITION_WORDS
        for word, value in enumerate([-1 if sequence is None else sequence, *others], first):
            self._words[word] = value

    def copy_active(self) -> None:
        """Give the copy that does not run the content of the one that does."""
        active, other = self.active, 1 - self.active
        with self.folder.alone(other):
            self.copies[other].copy_from(self.copies[active])
            self.set_position(other, self.position(active))


def now() -> int:
    """Return the time that processes of a machine have in common, in ns."""
    return time.monotonic_ns()


def _place(
    tensors: dict[str, tuple[str, list[int], int]],
    stored: Mapping[str, StoredTensor],
    names: Iterable[str],
    begin: int,
) -> int:
    """Give tensors places from a page on; return the end, rounded to a page."""
    for name in sorted(names):
        of = stored[name]
        tensors[name] = (str(of.dtype).removeprefix("torch."), list(of.shape), begin)
        begin += -(-of.bytes // ALIGNMENT) * ALIGNMENT
    return _pages(begin)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _whole(size: int) -> int:
    """Round the size of a copy to huge pages, if it is large."""
    return size if size < _HUGE_PAGES_FROM else -(-size // _HUGE_PAGE) * _HUGE_PAGE


def _file_bytes(head: int, layout: _Layout) -> int:
    """Return the size of a file; without copies, the offset of the first one."""
    first = _pages(head) + _PAGE
    if layout.copy_bytes >= _HUGE_PAGES_FROM:
        first = -(-first // _HUGE_PAGE) * _HUGE_PAGE
    return first + layout.copies * layout.copy_bytes


def _layout_of(path: Path, file: int) -> tuple[_Layout, int]:
    """Return the description of a file, and the offset of the state behind it."""

    def damaged(why: str) -> DamagedFileError:
        return DamagedFileError(
            f"{path}: {why}: end the processes that map it, remove the file, and load again",
            path=path,
        )

    head = os.pread(file, _HEAD.size, 0)
    if len(head) < _HEAD.size or head[: len(_MAGIC)] != _MAGIC:
        raise damaged("the file has no constants of a package")
    _, length, checksum = _HEAD.unpack(head)
    text = os.pread(file, length, _HEAD.size)
    if len(text) != length or checksum_of_bytes(text) != checksum:
        raise damaged("its description has a wrong checksum: it was cut off or written to")
    content: Any = parsed(text)
    layout = _Layout(**content)
    expected, found = _file_bytes(_HEAD.size + length, layout), os.fstat(file).st_size
    if found != expected:
        raise damaged(f"the file has {found} bytes, expected {expected}: it was cut off")
    return layout, _pages(_HEAD.size + length)


def _mapped(
    address: int | None, size: int, protection: int, flags: int, file: int, begin: int
) -> int:
    result = _libc.mmap(address, size, protection, flags, file, begin)
    if result is None or result == ctypes.c_void_p(-1).value:
        raise too_large(size, f"the system has no memory ({os.strerror(ctypes.get_errno())})")
    return int(result)


def _close(file: int, folder: Path | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked process leaves lock and files to its parent
        os.close(file)
        return
    release(file)
    if folder is not None:
        remove_unused(folder)


__all__ = ["SharedConstants", "SharedFile", "SharedPosition", "now"]
