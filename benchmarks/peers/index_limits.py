"""Reference index with the least work of any design: the limit of insertion and growth."""

from __future__ import annotations

import ctypes
import functools

import torch
from peers.build import build_alone
from torch import Tensor

import torch_dynemb as td

NAME = "reference kernel"
SLOTS = 4  # of a line: that many keys, then their values
_LINE_WORDS = 2 * SLOTS


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_alone("index")))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    signatures = {
        "insert_limit": [pointer, count, pointer, pointer, count, count, ctypes.c_int],
        "growth_limit": [pointer, count, pointer, count, ctypes.c_int],
    }
    for name, arguments in signatures.items():
        function = getattr(library, f"dynemb_peer_{name}")
        function.argtypes, function.restype = arguments, None
    return library


class ReferenceIndex:
    """Lines of four keys and values in memory of huge pages, as our index has.

    Ids of a full line overwrite others: it has the time of an index, not its results.

    Args:
        lines: their number.
    """

    def __init__(self, lines: int) -> None:
        self.lines = lines
        self._block = td.ops.reserve((lines, _LINE_WORDS), torch.int64, huge_pages=True)

    def insert(self, ids: Tensor, *, first_value: int, threads: int) -> Tensor:
        """Insert ids, all of them taken to be new.

        Args:
            ids: int64 [N], contiguous.
            first_value: of the first id, at least 1.
            threads: number of threads, each with a range of lines.

        Returns:
            Values of the ids, int64 [N].
        """
        values = torch.empty_like(ids)
        _library().dynemb_peer_insert_limit(
            *(self._block.data_ptr(), self.lines, ids.data_ptr(), values.data_ptr()),
            *(len(ids), first_value, threads),
        )
        return values

    def clear(self) -> None:
        """Clear all lines; their memory stays."""
        self._block.zero_()

    def grow_into(self, larger: ReferenceIndex, *, threads: int) -> None:
        """Move everything to ``larger``, which is empty, in the order of the lines.

        Args:
            larger: has more lines.
            threads: number of threads, each with a range of lines.
        """
        _library().dynemb_peer_growth_limit(
            *(self._block.data_ptr(), self.lines, larger._block.data_ptr(), larger.lines), threads
        )
