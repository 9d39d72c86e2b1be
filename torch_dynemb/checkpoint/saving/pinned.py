"""Pinning of rows that a background save reads in place, without a copy."""

from __future__ import annotations

from collections.abc import Sequence

from torch_dynemb.checkpoint.saving.source import GroupSource
from torch_dynemb.checkpoint.saving.stored_rows import StoredRows
from torch_dynemb.table.copy_on_write import CopyOnWriteRows


def pin_rows(groups: Sequence[GroupSource]) -> None:
    """Pin rows that are not copied. If it fails, call :func:`unpin_rows`.

    Args:
        groups: groups that are saved.

    Raises:
        RuntimeError: a disk is full or fails, or address space is exhausted.
    """
    for rows in _readers_of(groups):
        rows.pin()


def unpin_rows(groups: Sequence[GroupSource]) -> None:
    """Unpin the rows that :func:`pin_rows` pinned.

    Args:
        groups: groups that were saved.
    """
    for rows in _readers_of(groups):
        rows.release()


def _readers_of(groups: Sequence[GroupSource]) -> list[StoredRows | CopyOnWriteRows]:
    """List the readers of the groups, each once: one may read several slabs."""
    found = [slab.reader for group in groups for slab in group.slabs]
    return list(dict.fromkeys(reader for reader in found if reader is not None))


__all__ = ["pin_rows", "unpin_rows"]
