"""Reference kernel that finds rows by 64-bit ids and sums bags; see ragged/forward.cpp."""

from __future__ import annotations

import ctypes

import torch
from peers.build import build_alone
from torch import Tensor

_ROOM = 0.70  # of the slots of an index that are in use, as in ours when it is full
_WIDTH = 4  # ids of a bucket


class ReferenceTable:
    """Rows of one feature, found by their ids.

    Args:
        rows: float32 [N, dim].
        ids: int64 [N], the id of each row, all different.
    """

    def __init__(self, rows: Tensor, ids: Tensor) -> None:
        library = ctypes.CDLL(str(build_alone("ragged")))
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        fill, self._forward = library.dynemb_peer_ragged_fill, library.dynemb_peer_ragged_forward
        fill.argtypes = [pointer, count, pointer, count]
        self._forward.argtypes = [pointer, count, pointer, count, pointer, pointer, count]
        self._forward.argtypes += [pointer, pointer]
        fill.restype = self._forward.restype = None
        self._rows = rows.contiguous()
        self._lines = torch.zeros(int(len(ids) / _ROOM / _WIDTH) + 1, 2 * _WIDTH).long()
        fill(self._lines.data_ptr(), len(self._lines), ids.contiguous().data_ptr(), len(ids))

    def __call__(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Sums of bags.

        Args:
            ids: int64 [M], each of them one of the table.
            offsets: int64 [bags + 1].

        Returns:
            float32 [bags, dim].
        """
        bags, dim = len(offsets) - 1, self._rows.shape[1]
        output, row = torch.empty(bags, dim), torch.empty_like(ids)
        self._forward(
            *(self._lines.data_ptr(), len(self._lines), self._rows.data_ptr(), dim),
            *(ids.data_ptr(), offsets.data_ptr(), bags, row.data_ptr(), output.data_ptr()),
        )
        return output
