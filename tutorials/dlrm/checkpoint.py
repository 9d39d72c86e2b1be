"""Checkpoint files that are either whole or refused.

A file is written beside its final place under :func:`unfinished`'s name, flushed to the disk and
then renamed, so that the final name always holds a complete checkpoint, whenever the process dies.
Layout: 8 magic bytes, a ``torch.save`` archive, the SHA-256 digest of all bytes before it.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

_MAGIC = b"DLRM-CK1"
_DIGEST_BYTES = hashlib.sha256().digest_size
_CHUNK_BYTES = 1 << 20


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says why and what to do."""


def unfinished(path: Path) -> Path:
    """Return the name a checkpoint has while it is being written."""
    return path.with_name(path.name + ".unfinished")


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint in place of the one before, atomically and durably.

    Args:
        path: Where the checkpoint is to be; its folder exists.
        state: Nested dicts, lists and tuples of tensors, numbers and strings.
    """
    temporary = unfinished(path)
    with temporary.open("wb") as file:
        hashing = _HashingWriter(file)
        hashing.write(_MAGIC)
        torch.save(dict(state), cast(BinaryIO, hashing))
        file.write(hashing.digest())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the new name durable
    finally:
        os.close(folder)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Raises:
        CheckpointError: The file is not a checkpoint, or not as it was written.
    """
    size = path.stat().st_size
    end = size - _DIGEST_BYTES
    with path.open("rb") as file:
        if end < len(_MAGIC) or file.read(len(_MAGIC)) != _MAGIC:
            raise CheckpointError(
                f"{path} is not a checkpoint of this program (or of another version of it); "
                "delete it and start without --resume"
            )
        digest = hashlib.sha256(_MAGIC)
        left = end - len(_MAGIC)
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            digest.update(chunk)
            left -= len(chunk)
        if digest.digest() != file.read():
            raise CheckpointError(
                f"{path} is corrupted: its SHA-256 digest is not the one written with it; "
                "delete it and start without --resume"
            )
        archive = _Section(file, len(_MAGIC), end)
        return cast(dict[str, Any], torch.load(cast(BinaryIO, archive), weights_only=True))


def check_same_settings(recorded: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Refuse to go on under settings that would lead elsewhere.

    Args:
        recorded: Settings by name, from the checkpoint.
        given: Those of this run.

    Raises:
        CheckpointError: Any of them differs.
    """
    differing = [
        f"{name}: {recorded.get(name)!r} in the checkpoint, {given.get(name)!r} now"
        for name in sorted({*recorded, *given})
        if recorded.get(name) != given.get(name)
    ]
    if differing:
        raise CheckpointError(
            "cannot resume, the settings differ ("
            + "; ".join(differing)
            + "); repeat the settings of the checkpoint, or start without --resume"
        )


class _HashingWriter:
    """A file to write to that hashes what passes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> bytes:
        return self._hash.digest()


class _Section(io.RawIOBase):
    """Bytes ``begin`` to ``end`` of a file as a file of their own."""

    def __init__(self, file: BinaryIO, begin: int, end: int) -> None:
        self._file, self._begin, self._end = file, begin, end
        file.seek(begin)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._begin

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: self._begin, os.SEEK_CUR: self._file.tell(), os.SEEK_END: self._end}
        self._file.seek(base[whence] + offset)
        return self.tell()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._end - self._file.tell()))
        view[:count] = self._file.read(count)
        return count
