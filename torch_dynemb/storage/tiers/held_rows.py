"""Rows of a store as they were at one time."""

from __future__ import annotations

from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.storage.tiers.tiers import Records, Tiers


class HeldRows:
    """What a store on a disk keeps: another thread reads it while training goes on.

    Args:
        tiers: whose store has all rows, also those of the cache.

    Raises:
        RuntimeError: the disk fails.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers  # with which the store is open
        self._number = ops.store_hold(tiers.tensors.clock)

    def read(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records:
        """Rows of ids.

        Args:
            slab: that is tiered.
            table: whose ids they are.
            ids: int64 [n].
            handles: int64 [n], that their rows had, at least 0.

        Raises:
            RuntimeError: a record is damaged, or cannot be read.
        """
        return Records(
            *ops.store_read_held(self._tiers.tensors.clock, self._number, slab, handles, ids)
        )

    def release(self) -> None:
        """The store need not keep them any longer, nor can they be read; call it once."""
        ops.store_release(self._tiers.tensors.clock, self._number)


__all__ = ["HeldRows"]
