"""Pinned rows of a store: their values at one time."""

from __future__ import annotations

from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.storage.tiers.tiers import Records, Tiers


class PinnedRows:
    """Pinned rows of a store on a disk: another thread can read them while training goes on.

    Args:
        tiers: their store has the current values of all rows, cached ones included.

    Raises:
        RuntimeError: the disk fails.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers  # keeps the store open
        self._number = ops.store_pin(tiers.tensors.clock)

    def read(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records:
        """Read rows of ids, with their values at the time of the pin.

        Args:
            slab: a tiered one.
            table: of the ids.
            ids: int64 [n].
            handles: int64 [n], of the rows at that time, at least 0.

        Raises:
            RuntimeError: a record is damaged, or cannot be read.
        """
        clock = self._tiers.tensors.clock
        found = ops.store_read(clock, slab, handles.cpu(), ids.cpu(), pin=self._number)
        return Records(*(part.to(ids.device) for part in found))

    def release(self) -> None:
        """Unpin the rows, after which they cannot be read; call it once."""
        ops.store_release(self._tiers.tensors.clock, self._number)


__all__ = ["PinnedRows"]
