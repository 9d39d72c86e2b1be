"""Blocks of files: which ways of reading them there are, and reads by each of them."""

from __future__ import annotations

import os
from enum import IntEnum

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake


class IoPath(IntEnum):
    """How blocks of files are read."""

    AUTO = 0  # by io_uring where there is one, else by threads
    URING = 1  # a queue of reads in the kernel
    THREADS = 2  # 32 threads that wait for a read each


def store_io_paths() -> list[IoPath]:
    """The ways of reading files that this build and this kernel have; AUTO takes the first.

    io_uring is there if torch_dynemb was built with liburing and the kernel allows it, which many
    containers do not. It is asked once in a process.

    Returns:
        ``IoPath.THREADS``, and ``IoPath.URING`` before it where there is one.

    Raises:
        RuntimeError: the kernel's answer says neither, such as that the process may open no more
            files.

    Example:
        >>> IoPath.THREADS in store_io_paths()
        True
    """
    return [IoPath(path) for path in torch.ops.dynemb.store_io_paths()]


@raises_typed_errors
def read_blocks(
    path: str | os.PathLike[str], offsets: Tensor, *, block_bytes: int, io: IoPath = IoPath.AUTO
) -> Tensor:
    """Reads blocks of a file, many at a time, past the page cache where the file system can.

    Tables on SSDs read their rows in this way; this function is for tests and measurements of it.
    Other Python threads run meanwhile.

    Args:
        path: of a file.
        offsets: int64 [n], where blocks begin, multiples of 4096 in any order.
        block_bytes: of each of them, a multiple of 4096.
        io: how they are read.

    Returns:
        uint8 [n, block_bytes], on the CPU.

    Raises:
        RuntimeError: an argument is wrong, there is no such way of reading, the file cannot be
            opened, or a block cannot be read: with the offset of the first such one, and why.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     written = file.write(b"a" * 4096 + b"b" * 4096)
        ...     file.flush()
        ...     blocks = read_blocks(file.name, torch.tensor([4096, 0]), block_bytes=4096)
        >>> blocks[:, 0].tolist() == [ord("b"), ord("a")]
        True
    """
    name = torch.tensor(list(os.fsencode(path)), dtype=torch.uint8)
    return torch.ops.dynemb.read_blocks(name, offsets, block_bytes, int(io))  # type: ignore[no-any-return]


@register_fake("read_blocks")
def _read_blocks_fake(path: Tensor, offsets: Tensor, block_bytes: int, io: int) -> Tensor:
    return offsets.new_empty((offsets.shape[0], block_bytes), dtype=torch.uint8)
