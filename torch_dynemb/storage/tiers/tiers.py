"""Tiered rows of a group, as the functions on tables see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.tensors import IndexTensors, TierTensors
from torch_dynemb.storage.tiers.stats import StorageStats


class Records(NamedTuple):
    """Rows in the format of stores.

    Attributes:
        records: uint8 [n, bytes]; undefined where ``found`` is False.
        found: bool [n]: False for rows that were never written, which have their initial values.
    """

    records: Tensor
    found: Tensor


class PinnedRecords(Protocol):
    """Rows as they were when they were pinned. Another thread may read them during training."""

    def read(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records:
        """Read rows of ids; see :meth:`Tiers.read`.

        Args:
            slab, table, ids, handles: as there; handles are those of the time of the pin.
        """

    def release(self) -> None:
        """Unpin the rows, after which they cannot be read; call it once."""


class Tiers(ABC):
    """The tiered slabs of a group: a cache of rows, and the rows beneath it.

    Args:
        tensors: of the cache.
        cached: numbers of the tiered slabs.

    Attributes:
        pins: whether :meth:`pin` is built.
        records_changes: whether :meth:`dirty_bits` and :meth:`set_dirty_bits` are built.
        prefetches_beside: whether all work of :meth:`prefetch` is in the order of a stream, so that
            it can run beside training.
    """

    pins: ClassVar[bool] = False
    records_changes: ClassVar[bool] = False
    prefetches_beside: ClassVar[bool] = False

    def __init__(self, tensors: TierTensors, cached: Sequence[int]) -> None:
        self.tensors = tensors
        self.cached = tuple(cached)

    def holds(self, slab: int) -> bool:
        """Return whether the rows of a slab are tiered.

        Args:
            slab: its number.
        """
        return slab in self.cached

    def most_rows(self, slab: int) -> int:
        """Return the number of rows that a tiered slab may have.

        Args:
            slab: its number.
        """
        return self.tensors.places[slab].shape[0]

    # -- lookups -------------------------------------------------------------------------------

    @abstractmethod
    def reserve_space(self, index: IndexTensors, batch: ops.LookupBatch) -> None:
        """Reserve space in the store for the rows of ids that will be inserted for :meth:`stage`.

        Args:
            index, batch: as of :func:`torch_dynemb.ops.reserve_space_`.

        Raises:
            RuntimeError: the store lacks space, or has failed; nothing has changed.
        """

    @abstractmethod
    def stage(self, staged: ops.StagedIds, *, trains: bool) -> Tensor:
        """Load the rows of a lookup into memory; see :func:`torch_dynemb.ops.stage_`.

        Args:
            staged, trains: as there.
        """

    @abstractmethod
    def lookup(self, batch: ops.LookupBatch, handles: Tensor) -> Tensor:
        """Look rows up without training; see :func:`torch_dynemb.ops.staged_lookup_`.

        Args:
            batch, handles: as there.
        """

    @abstractmethod
    def prefetch(self, staged: ops.StagedIds, *, ahead: int) -> None:
        """Start to load rows into memory; see :func:`torch_dynemb.ops.prefetch_`.

        Args:
            staged, ahead: as there.
        """

    # -- rows without a lookup -----------------------------------------------------------------

    @abstractmethod
    def read(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records:
        """Read rows of ids, wherever they are, without moving them.

        Args:
            slab: a tiered one.
            table: of the ids.
            ids: int64 [n].
            handles: int64 [n], of their rows, at least 0.
        """

    @abstractmethod
    def write(self, slab: int, table: int, ids: Tensor, handles: Tensor, records: Tensor) -> None:
        """Write rows of ids, cached ones into their slots.

        A row keeps its slot, because pending gradients name it.

        Args:
            slab, table, ids, handles: as for :meth:`read`; ids are distinct.
            records: uint8 [n, bytes]; their headers are not read.
        """

    @abstractmethod
    def erase(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> None:
        """Drop rows of ids that were removed from their table.

        Args:
            slab: a tiered one.
            table: its number.
            ids: int64 [n].
            handles: int64 [n], of their rows before the removal.
        """

    @abstractmethod
    def rows_of(self, slab: int, numbers: Tensor) -> Tensor:
        """Return the rows that handles of :meth:`stage` name, int64 [n].

        Args:
            slab: a tiered one.
            numbers: int64 [n], of these handles.
        """

    # -- changes -------------------------------------------------------------------------------

    def pin(self) -> PinnedRecords:
        """Pin the current rows, cached ones included.

        Raises:
            DiskFullError: the disk is full.
            HostMemoryError: there is too little memory for copies.
            RuntimeError: the disk fails; or this storage cannot pin rows.
        """
        raise RuntimeError(f"{type(self).__name__} cannot pin rows: save without asynchronous")

    def copied_bytes(self, slab: int) -> int:
        """Return the bytes of host memory that :meth:`pin` takes for a slab.

        Args:
            slab: a tiered one.
        """
        return 0

    def dirty_bits(self, slab: int, handles: Tensor) -> Tensor:
        """Return the dirty bits of rows, uint8 [n]; all are set for rows that were never written.

        Args:
            slab: a tiered one.
            handles: int64 [n], of rows, at least 0.

        Raises:
            RuntimeError: this storage records no changes.
        """
        raise RuntimeError(f"{type(self).__name__} records no changes: save whole checkpoints")

    def set_dirty_bits(self, slab: int, used_rows: int, *, kept: int, added: int) -> None:
        """Clear and set dirty bits of all rows of a slab.

        Args:
            slab: a tiered one.
            used_rows: rows of the slab that have had an owner.
            kept: bits that stay.
            added: bits that are set.

        Raises:
            RuntimeError: this storage records no changes.
        """
        raise RuntimeError(f"{type(self).__name__} records no changes: save whole checkpoints")

    # -- steps ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Number of the current step: rows of its lookups keep their place until it ends."""

    @abstractmethod
    def end_step(self, index: IndexTensors) -> None:
        """End a training step: from now on, rows of its lookups may lose their slots.

        Args:
            index: of the tables.

        Raises:
            RuntimeError: a read or write has failed.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise RuntimeError if a read or write has failed, without waiting."""

    # -- memory --------------------------------------------------------------------------------

    @abstractmethod
    def used_slots(self, slab: int) -> int:
        """Return the number of a slab's slots that have had a row; waits for a GPU.

        Args:
            slab: its number.
        """

    @abstractmethod
    def rows_in_memory(self, slab: int, used_rows: int) -> int:
        """Return the number of rows in memory, slots included; waits for a GPU.

        Args:
            slab: its number.
            used_rows: rows of the slab that have had an owner.
        """

    @abstractmethod
    def kept_rows(self, slab: int, used_rows: int) -> int:
        """Return the number of rows that keep memory when unused memory is given back.

        Rows from ``used_rows`` on leave the cache.

        Args:
            slab, used_rows: as for :meth:`rows_in_memory`.
        """

    @abstractmethod
    def stats(self) -> StorageStats:
        """Return the counters of all slabs together; waits for a GPU."""


__all__ = ["PinnedRecords", "Records", "Tiers"]
