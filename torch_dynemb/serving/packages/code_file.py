"""The checksum of a file without tensors: the compiled code."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from torch_dynemb import ops
from torch_dynemb.errors import DamagedFileError
from torch_dynemb.files.checksummed_files import BLOCK_BYTES, FileChecksums


def sums_of_file(path: Path) -> FileChecksums:
    """Return size and checksums of a file as it is now.

    Raises:
        OSError: it cannot be read.
    """
    sums: list[int] = []
    size = 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(BLOCK_BYTES):
            sums.append(ops.crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8)))
            size += len(data)
        os.fsync(file.fileno())
    return FileChecksums(size, BLOCK_BYTES, tuple(sums))


def check_code(path: Path, expected: FileChecksums) -> None:
    """Raise DamagedFileError unless a file has its checksum."""
    if not path.is_file():
        raise DamagedFileError(f"{path}: the file is missing", path=path)
    found = sums_of_file(path)
    if found.bytes != expected.bytes:
        raise DamagedFileError(
            f"{path}: the file has {found.bytes} bytes, expected {expected.bytes}: it was cut off "
            "or written to",
            path=path,
        )
    if found.sums != expected.sums:
        raise DamagedFileError(
            f"{path}: the checksum is wrong: the file was damaged after it was written", path=path
        )


__all__ = ["check_code", "sums_of_file"]
