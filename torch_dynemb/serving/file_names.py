"""The tensor that names a file of rows, as ops take it (csrc/cpu/serving/row_files.h)."""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb.errors import DamagedStoreError
from torch_dynemb.ops import IoPath

MAGIC = 0x31656C6966776F72  # kRowFileMagic of csrc/core/serving/row_file.h
_WORDS = 7  # before the path
_PATH_BYTES = 4096
_PATH_BYTES_WORD = 5  # kNamedPathBytes


def new_identity() -> tuple[int, ...]:
    """Return an id for a new file, two words of int64."""
    return struct.unpack("<2q", uuid.uuid4().bytes)


def new_instance() -> int:
    """Return the number of new live tables, which no others have."""
    return new_identity()[0] >> 1 or 1


def name_file(
    path: str | os.PathLike[str],
    identity: Sequence[int],
    *,
    cache_bytes: int,
    io: int = IoPath.AUTO,
    instance: int = 0,
) -> Tensor:
    """Return the tensor that names a file.

    Args:
        path: of the file, up to 4096 bytes.
        identity: its id, two words of int64.
        cache_bytes: of rows in memory.
        io: how blocks are read, an ``IoPath``.
        instance: of live tables, :func:`new_instance`; 0: the rows do not change.

    Returns:
        int64 [519].

    Raises:
        ValueError: the path is longer, or not UTF-8.
    """
    text = os.fsencode(os.path.abspath(path))
    try:
        text.decode()
    except UnicodeDecodeError:
        raise ValueError(f"SSDStore: path is {text!r}, expected one of UTF-8") from None
    if len(text) > _PATH_BYTES:
        raise ValueError(f"SSDStore: path has {len(text)} bytes, expected at most {_PATH_BYTES}")
    head = struct.pack("<7q", MAGIC, *identity, cache_bytes, int(io), len(text), instance)
    whole = bytearray(head + text.ljust(_PATH_BYTES, b"\0"))
    return torch.frombuffer(whole, dtype=torch.int64)


def moved_file(
    file: Tensor,
    path: str | os.PathLike[str],
    cache_bytes: int | None = None,
    instance: int = 0,
) -> Tensor:
    """Return the tensor of a file that lies elsewhere now, or gets another cache.

    Args:
        file: the tensor that named it.
        path: of the file.
        cache_bytes: of rows in memory; None: as before.
        instance: of live tables, or 0.
    """
    _, *identity, cache, io, _, _ = file[:_WORDS].tolist()
    size = cache if cache_bytes is None else cache_bytes
    return name_file(path, identity, cache_bytes=size, io=io, instance=instance)


def check_named(file: Tensor, path: str | os.PathLike[str]) -> None:
    """Raise DamagedStoreError unless a file is the one that a tensor names.

    Args:
        file: the tensor.
        path: of the file.

    Raises:
        FileNotFoundError: it is missing.
    """
    with open(path, "rb") as opened:
        head = opened.read(32)
        size = opened.seek(0, os.SEEK_END)
    own = struct.pack("<3q", MAGIC, *file[1:3].tolist())
    if head[:24] != own or head[24:] != struct.pack("<q", size):
        raise DamagedStoreError(
            f"{path}: the file was replaced or cut short, and is not that of this model: put it "
            "back, or freeze the model again",
            path=os.fspath(path),
        )


def use_of(file: Tensor) -> tuple[int, ...]:
    """Return the id and the instance in the tensor that names a file."""
    _, *identity, _, _, _, instance = file[:_WORDS].tolist()
    return *identity, instance


def path_of(file: Tensor) -> str:
    """Return the path in the tensor that names a file."""
    words = file.tolist()
    text = struct.pack(f"<{len(words) - _WORDS}q", *words[_WORDS:])
    return os.fsdecode(text[: words[_PATH_BYTES_WORD]])


__all__ = [
    "MAGIC",
    "check_named",
    "moved_file",
    "name_file",
    "new_identity",
    "new_instance",
    "path_of",
    "use_of",
]
