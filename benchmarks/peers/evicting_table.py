"""Reference table with eviction: the least work of its index, and of a step, for a batch."""

from __future__ import annotations

import ctypes

import torch
from peers.build import build_alone
from torch import Tensor

DIM, INITIAL_VALUE = 64, 0.01  # as in evicting/index.h
LEARNING_RATE = 0.01


class EvictingTable:
    """The table in evicting/: full, with no policy, no order of new ids and no counts.

    It gives each new id the row of the one with the least score in eight buckets. Every id of a
    batch has to occur once in it. Rows have :data:`DIM` columns, and begin with
    :data:`INITIAL_VALUE`.

    Args:
        ids: int64 [capacity], distinct: what it holds at first.
        batch: how many of them count as seen in one step.
        frequent: whether scores count lookups (LFU); otherwise they are steps (LRU).
        reads_lines: whether the search for a victim reads which slots are free. Otherwise it takes
            slots with a score of 0 for free, as an id that was last seen in step 0 has.
    """

    def __init__(
        self, ids: Tensor, *, batch: int, frequent: bool, reads_lines: bool = False
    ) -> None:
        library = ctypes.CDLL(str(build_alone("evicting")))
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        make = library.dynemb_peer_evicting_index
        make.restype = pointer
        make.argtypes = [pointer, count, count, ctypes.c_int, ctypes.c_int]
        self._look_up = library.dynemb_peer_evicting_index_look_up
        self._look_up.argtypes = [pointer, pointer, count, pointer, ctypes.c_int]
        self._look_up.restype = None
        self._delete = library.dynemb_peer_evicting_index_delete
        self._delete.argtypes = [pointer]
        self._delete.restype = None
        self._step = library.dynemb_peer_evicting_step
        self._step.argtypes = [pointer, pointer, count, count, pointer, pointer]
        self._step.argtypes += [ctypes.c_float, ctypes.c_int]
        self._step.restype = None
        self._index = make(ids.data_ptr(), len(ids), batch, frequent, reads_lines)

    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows and generations of ids, int64 [N], of one step, on torch's threads."""
        rows = torch.empty_like(ids)
        threads = torch.get_num_threads()
        self._look_up(self._index, ids.data_ptr(), len(ids), rows.data_ptr(), threads)
        return rows

    def train(self, ids: Tensor, grad: Tensor) -> Tensor:
        """Train one step by row-wise Adagrad, on torch's number of threads.

        Args:
            ids: int64 [N], contiguous: as many to each of the bags of `grad`.
            grad: float32 [bags, DIM], contiguous, the gradient of the sums.

        Returns:
            float32 [bags, DIM], the sums of the rows before the step.
        """
        sums = torch.empty_like(grad)
        threads = torch.get_num_threads()
        pointers = (ids.data_ptr(), len(grad), len(ids) // len(grad), sums.data_ptr())
        self._step(self._index, *pointers, grad.data_ptr(), LEARNING_RATE, threads)
        return sums

    def __del__(self) -> None:
        self._delete(self._index)
