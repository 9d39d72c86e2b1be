"""Tiers above files of a directory, with or without a GPU's cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.storage.tiers.configs import SSDStore
from torch_dynemb.storage.tiers.pinned_rows import PinnedRows


class StoreFiles(ABC):
    """Files with the rows of a group.

    Attributes:
        storage: their config.
    """

    storage: SSDStore

    @abstractmethod
    def sync(self) -> ops.StoreSnapshot:
        """Make all rows durable, cached ones included.

        Returns:
            The state to :meth:`restore`. Its files stay until a call of :meth:`keep` without them.

        Raises:
            DiskFullError: the disk is full.
            RuntimeError: the disk fails.
        """

    @abstractmethod
    def pin(self) -> PinnedRows:
        """Pin the current rows, cached ones included.

        Raises:
            DiskFullError: the disk is full.
            RuntimeError: the disk fails.
        """

    @abstractmethod
    def keep(self, files: Sequence[Tensor]) -> None:
        """Keep these files although the current tables do not need them; others may be deleted.

        Args:
            files: int64 [files] of each slab, their numbers.

        Raises:
            RuntimeError: the disk fails.
        """

    @abstractmethod
    def restore(self, snapshot: ops.StoreSnapshot) -> None:
        """Restore the state of an earlier :meth:`sync`; afterwards the caches are empty.

        Args:
            snapshot: of these files.

        Raises:
            DamagedStoreError: a file is missing or damaged; files and caches are unchanged.
            RuntimeError: the disk fails.
        """


__all__ = ["StoreFiles"]
