"""Reference kernel of initial values: the least time of Normal ones."""

from __future__ import annotations

import ctypes

import torch
from peers.build import build_alone
from torch import Tensor

DIM = 64
_SIDE_BY_SIDE = 8  # rows


class NormalRows:
    """The kernel in initial/rows.cpp, which computes rows on one thread and keeps none of them.

    Args:
        count: ids of a call, of which a remainder by eight is left out.
    """

    def __init__(self, count: int) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._compute = ctypes.CDLL(str(build_alone("initial"))).dynemb_peer_initial_rows
        self._compute.argtypes = [pointer, number, number, pointer]
        self._compute.restype = None
        self._ids = torch.arange(count) * 0x9E3779B97F4A7C1

    def compute(self) -> Tensor:
        """Return the last eight rows, float32 [8, DIM]."""
        rows = torch.empty(_SIDE_BY_SIDE, DIM)
        self._compute(self._ids.data_ptr(), len(self._ids), 0, rows.data_ptr())
        return rows
