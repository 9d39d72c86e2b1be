"""File system calls of a checkpoint: few methods, each of which a test can make fail."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

from torch import Tensor

from torch_dynemb.files.locations import Location, local

MANIFEST = "manifest.json"  # appears last, so what it names is complete
UNFINISHED = "torch_dynemb-unfinished"  # the process that writes or removes a checkpoint


class Disk:
    """The file system. Every change that a save makes goes through one of these methods.

    :class:`UrlDisk` has them for URLs.
    """

    def make_folder(self, path: Location) -> None:
        """Create a folder unless it exists."""
        local(path).mkdir(exist_ok=True)

    def create(self, path: Location) -> int:
        """Create an empty file. Return its descriptor."""
        return os.open(local(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write_at(self, file: int, data: memoryview, begin: int) -> int:
        """Write some bytes from ``begin`` on. Return how many were written."""
        return os.pwrite(file, data, begin)

    def room_at(self, file: int, begin: int, size: int) -> Tensor | None:
        """Return memory from which :meth:`write_at` writes without a copy, uint8 [size], if any.

        Args:
            file: the file.
            begin: place of the next bytes that are written from this memory.
            size: their number.
        """
        return None

    def begin_sync(self, file: int, begin: int, size: int) -> None:
        """Start writing some bytes of a file to the disk, without waiting.

        The disk then works while the next bytes are computed, and :meth:`sync` has little left to
        do. Linux does this for POSIX_FADV_DONTNEED. Pages that are not written yet stay in memory.
        """
        os.posix_fadvise(file, begin, size, os.POSIX_FADV_DONTNEED)

    def end(self, file: int) -> None:
        """Note that all bytes of a file are written. A disk needs no such note."""

    def sync(self, file: int) -> None:
        """Wait until a file is on the disk."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)

    def sync_folder(self, path: Location) -> None:
        """Wait until the names in a folder are on the disk."""
        folder = os.open(local(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def rename(self, source: Location, target: Location) -> None:
        """Rename a file or a folder atomically."""
        local(source).rename(local(target))

    def remove(self, path: Location) -> None:
        """Remove a folder that this library created, with its content. It may be missing already.

        The manifest becomes the mark of an unfinished checkpoint first, and the mark is removed
        last. So what an interrupted removal leaves is never mistaken for a checkpoint or a user's
        folder.
        """
        path = local(path)
        mark = path / UNFINISHED
        with suppress(OSError):
            (path / MANIFEST).rename(mark)
        with suppress(OSError):
            for entry in list(path.iterdir()):
                if entry == mark:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    with suppress(OSError):
                        entry.unlink()
        with suppress(OSError):
            mark.unlink()
        with suppress(OSError):
            path.rmdir()


__all__ = ["MANIFEST", "UNFINISHED", "Disk"]
