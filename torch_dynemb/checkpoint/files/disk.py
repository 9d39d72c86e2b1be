"""What a checkpoint asks of the file system: few calls, each of which a test can make fail."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from torch_dynemb.checkpoint.entries import MANIFEST, UNFINISHED
from torch_dynemb.checkpoint.files.exchange import exchange


class Disk:
    """The file system. Every change that a save makes goes through one of these methods."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder; it may be there already."""
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> int:
        """Makes an empty file; returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, file: int, data: memoryview) -> int:
        """Writes some bytes at the end; returns how many."""
        return os.write(file, data)

    def write_at(self, file: int, data: memoryview, begin: int) -> int:
        """Writes some bytes from ``begin`` on; returns how many."""
        return os.pwrite(file, data, begin)

    def begin_sync(self, file: int, begin: int, size: int) -> None:
        """Begins to bring some bytes of a file to the disk, and does not wait.

        So the disk works while the next bytes are made, and :meth:`sync` has little left to do.
        That is what Linux does when it is told that nobody needs the pages any more; those that
        are not on the disk yet stay in memory.
        """
        os.posix_fadvise(file, begin, size, os.POSIX_FADV_DONTNEED)

    def sync(self, file: int) -> None:
        """Waits until a file is on the disk."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Closes a file."""
        os.close(file)

    def sync_folder(self, path: Path) -> None:
        """Waits until the names in a folder are on the disk."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file or a folder another name, at once."""
        source.rename(target)

    def exchange(self, first: Path, second: Path) -> bool:
        """Gives each of two folders the other's name, at once; False: it cannot."""
        return exchange(first, second)

    def remove(self, path: Path) -> None:
        """Removes a folder that this library made, with all that is in it; it may be gone already.

        The manifest becomes the mark of an unfinished checkpoint first, so that nothing takes what
        is left on the way for a whole one, or for a folder of the user. The mark goes last.
        """
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


__all__ = ["Disk"]
