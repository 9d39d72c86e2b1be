"""Reads of many blocks of a file at once, by io_uring or by threads."""

from __future__ import annotations

import os
from enum import IntEnum

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake


class IoPath(IntEnum):
    """Ways of reading blocks of files."""

    AUTO = 0  # by io_uring where it is available, otherwise by threads
    URING = 1  # a queue of reads in the kernel
    THREADS = 2  # 32 threads, each waiting for one read


def store_io_paths() -> list[IoPath]:
    """Return the ways of reading files that work here; AUTO takes the first.

    io_uring needs a build with liburing and a kernel that allows it; many containers do not. The
    kernel is asked once in a process.

    Returns:
        ``IoPath.THREADS``, preceded by ``IoPath.URING`` where it is available.

    Raises:
        RuntimeError: the kernel neither makes nor forbids a ring, for example because the process
            may open no more files.

    Example:
        >>> IoPath.THREADS in store_io_paths()
        True
    """
    return [IoPath(path) for path in torch.ops.dynemb.store_io_paths()]


@raises_typed_errors
def read_blocks(
    path: str | os.PathLike[str], offsets: Tensor, *, block_bytes: int, io: IoPath = IoPath.AUTO
) -> Tensor:
    """Read blocks of a file, many at a time, past the page cache where the file system can.

    Tables on SSDs read their rows in this way; this function serves tests and measurements of it.
    Other Python threads run meanwhile.

    Args:
        path: of a file.
        offsets: int64 [n], where blocks begin, multiples of 4096 in any order.
        block_bytes: of each of them, a multiple of 4096.
        io: how they are read.

    Returns:
        uint8 [n, block_bytes], on the CPU.

    Raises:
        RuntimeError: an argument is wrong, ``io`` is unavailable, the file cannot be opened, or a
            block cannot be read. The last names the offset of the first such block and the reason.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     written = file.write(b"a" * 4096 + b"b" * 4096)
        ...     file.flush()
        ...     blocks = read_blocks(file.name, torch.tensor([4096, 0]), block_bytes=4096)
        >>> blocks[:, 0].tolist() == [ord("b"), ord("a")]
        True
    """
    name = torch.tensor(list(os.fsencode(path)), dtype=torch.uint8, device="cpu")
    return torch.ops.dynemb.read_blocks(name, offsets, block_bytes, int(io))  # type: ignore[no-any-return]


@register_fake("read_blocks")
def _read_blocks_fake(path: Tensor, offsets: Tensor, block_bytes: int, io: int) -> Tensor:
    return offsets.new_empty((offsets.shape[0], block_bytes), dtype=torch.uint8)
