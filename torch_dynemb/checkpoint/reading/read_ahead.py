"""Reading of pieces of files in a thread, while earlier pieces are used."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor


class Read(NamedTuple):
    """A piece to be read.

    Attributes:
        shape, dtype: of the piece.
        fill: reads it into a contiguous CPU tensor; called in the thread.
        use: takes it, in the calling thread; the piece is valid until ``use`` returns.
        into: tensor to read into; None: a buffer.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[Tensor], None]
    use: Callable[[Tensor], None]
    into: Tensor | None = None


def read_ahead(reads: Generator[Read, None, None]) -> None:
    """Read pieces in order, one ahead of the one in use.

    When the next piece is requested, the one before has been read, so its file may be closed.

    Args:
        reads: pieces of any number of files; closed at the end.

    Raises:
        Exception: error of reading or using a piece.
    """
    buffers = [
        torch.empty(0, dtype=torch.uint8, device="cpu"),
        torch.empty(0, dtype=torch.uint8, device="cpu"),
    ]
    with closing(reads), ThreadPoolExecutor(1, "checkpoint reading") as pool:

        def begin(read: Read) -> tuple[Read, Future[Tensor]]:
            buffers.reverse()  # the other one is in use
            if read.into is None:
                size = torch.Size(read.shape).numel() * read.dtype.itemsize
                if buffers[0].numel() < size:
                    buffers[0] = torch.empty(size, dtype=torch.uint8, device="cpu")
                piece = buffers[0][:size].view(read.dtype).view(read.shape)
            else:
                piece = read.into
            return read, pool.submit(_filled, read, piece)

        first = next(reads, None)
        now = None if first is None else begin(first)
        while now is not None:
            read, future = now
            piece = future.result()
            following = next(reads, None)
            now = None if following is None else begin(following)
            read.use(piece)


def _filled(read: Read, piece: Tensor) -> Tensor:
    if piece.numel() > 0:
        read.fill(piece)
    return piece


__all__ = ["Read", "read_ahead"]
