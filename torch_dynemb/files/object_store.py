"""The few operations on a file system of fsspec that checkpoints and logs need.

Rename, append and lock are not among them: object stores have none. A file appears as a whole by
:meth:`ObjectStore.put`, or not at all.
"""

from __future__ import annotations

import errno
import inspect
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import Any

# A file appears with its last byte there. Elsewhere put() writes a draft, and renames it.
_WHOLE_PUTS = frozenset(
    ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "r2", "memory")
)


_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    NotADirectoryError: errno.ENOTDIR,
}


class ObjectStore:
    """A file system of fsspec.

    Args:
        fs: an ``fsspec.AbstractFileSystem``.

    Attributes:
        whole_puts: whether the file system itself lets a file appear as a whole.
    """

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        names = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
        self.whole_puts = not _WHOLE_PUTS.isdisjoint(names)

    def key(self, url: str) -> str:
        """Return the name of a place within the file system."""
        return str(self._fs._strip_protocol(url))

    # -- reading ---------------------------------------------------------------------------------

    def read(self, url: str, begin: int = 0, end: int | None = None) -> bytes:
        """Read a range of a file; fewer bytes at its end.

        Args:
            url: the file.
            begin: first byte; negative: from the end.
            end: byte after the last one; None: the end of the file.

        Raises:
            FileNotFoundError: it does not exist.
            OSError: the store fails.
        """
        with _errors_of(url):
            data = self._fs.cat_file(self.key(url), start=begin, end=end)
        return bytes(data)

    def exists(self, url: str) -> bool:
        """Return whether a file, or a folder with files, exists."""
        key = self.key(url)
        with _errors_of(url):
            self._forget(key)
            try:
                self._fs.info(key)
            except FileNotFoundError:
                return False
        return True

    def is_file(self, url: str) -> bool:
        """Return whether a file exists."""
        key = self.key(url)
        with _errors_of(url):
            self._forget(key)
            try:
                return bool(self._fs.info(key)["type"] == "file")
            except FileNotFoundError:
                return False

    def names(self, url: str) -> set[str]:
        """Return the names of the files and folders in a folder; empty if it does not exist."""
        key = self.key(url)
        with _errors_of(url):
            self._forget(key)
            try:
                entries = self._fs.ls(key, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return set()
        found = {str(entry).rstrip("/").rpartition("/")[2] for entry in entries}
        return found - {"", key.rstrip("/").rpartition("/")[2]}

    def sizes(self, url: str) -> dict[str, int]:
        """Return the sizes in bytes of all files below a folder, by path relative to it."""
        key = self.key(url)
        with _errors_of(url):
            self._forget(key)
            found = self._fs.find(key, detail=True)
        start = len(key.rstrip("/")) + 1
        return {name[start:]: int(entry["size"]) for name, entry in found.items()}

    def last_change(self, url: str) -> datetime | None:
        """Return the time of the newest file below a folder, or of an empty folder; None if it is
        unknown.
        """
        key = self.key(url)
        with _errors_of(url):
            self._forget(key)
            try:
                times = [self._fs.modified(name) for name in self._fs.find(key) or [key]]
            except (FileNotFoundError, NotImplementedError):
                return None
        known = [of if of.tzinfo else of.replace(tzinfo=timezone.utc) for of in times if of]
        return max(known, default=None)

    # -- writing ---------------------------------------------------------------------------------

    def make_folder(self, url: str) -> None:
        """Create a folder and those above it, where the store has folders."""
        if not self.whole_puts:
            with _errors_of(url):
                self._fs.makedirs(self.key(url), exist_ok=True)

    def put(self, url: str, data: bytes | bytearray) -> None:
        """Write a file as a whole, in place of one of this name.

        Args:
            url: the file.
            data: its content.

        Raises:
            OSError: the store fails. The file is the one from before, or has the new content.
        """
        key = self.key(url)
        with _errors_of(url):
            if self.whole_puts:
                self._fs.pipe_file(key, data)
                return
            draft = f"{key}.tmp-{uuid.uuid4().hex}"
            try:
                self._fs.pipe_file(draft, data)
                self._fs.mv(draft, key)
            except BaseException:
                with suppress(Exception):
                    self._fs.rm_file(draft)
                raise

    @property
    def offers_create(self) -> bool:
        """Whether the client has a conditional PUT. The server may ignore the condition."""
        if not self.whole_puts:
            return False
        # the fallback of fsspec tests, then writes: two writers may both succeed
        own = getattr(self._fs, "_pipe_file", self._fs.pipe_file)
        return "mode" in inspect.signature(own).parameters

    def create(self, url: str, data: bytes | bytearray) -> None:
        """Write a file as a whole if none has this name: a conditional PUT (if-none-match).

        Args:
            url: the file.
            data: its content.

        Raises:
            FileExistsError: a file has this name. It may be this one: a client repeats a request
                if its answer was lost.
            OSError: the store fails.
        """
        with _errors_of(url):
            self._fs.pipe_file(self.key(url), data, mode="create")

    def stream(self, url: str, part_bytes: int) -> Any:
        """Open a new file that is uploaded in parts, from front to back.

        Args:
            url: the file.
            part_bytes: size of a part.
        """
        with _errors_of(url):
            return self._fs.open(self.key(url), "wb", block_size=part_bytes)

    def remove(self, url: str) -> None:
        """Remove a folder with its content; it may be missing.

        Raises:
            OSError: the store fails.
        """
        key = self.key(url)
        with _errors_of(url):
            self._forget(key)
            with suppress(FileNotFoundError):
                self._fs.rm(key, recursive=True)

    def remove_files(self, urls: Sequence[str]) -> None:
        """Remove files. The first ones are removed first.

        Raises:
            OSError: the store fails.
        """
        for url in urls:
            with _errors_of(url), suppress(FileNotFoundError):
                self._fs.rm_file(self.key(url))

    def _forget(self, key: str) -> None:
        """Forget cached listings: other processes write to the store."""
        self._fs.invalidate_cache(key)


@contextmanager
def _errors_of(url: str) -> Iterator[None]:
    """Raise errors of a store as OSErrors that name the URL, and what is missing."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
        if error.filename is not None:
            raise
        number = error.errno or _NUMBERS[type(error)]
        text = error.strerror or str(error) or os.strerror(number)
        raise type(error)(number, text, url) from error
    except Exception as error:
        kind = type(error).__name__
        if isinstance(error, PermissionError) or "Credential" in kind:
            raise PermissionError(
                errno.EACCES,
                f"the store has refused access ({kind}: {error}): give credentials, in the way of "
                "the package of this protocol, or as fsspec.config.conf[protocol]",
                url,
            ) from error
        if isinstance(error, OSError) and error.filename is not None:
            raise
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
        raise OSError(number, f"the store has failed ({kind}: {error})", url) from error


__all__ = ["ObjectStore"]
