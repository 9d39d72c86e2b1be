"""Keeps rows in stores as they are for a save that goes on while training does."""

from __future__ import annotations

from collections.abc import Sequence

from torch_dynemb.checkpoint.saving.source import GroupSource
from torch_dynemb.checkpoint.saving.stored_rows import StoredRows


def hold_rows(groups: Sequence[GroupSource]) -> None:
    """Has all stores keep their rows as they are now; whatever stops it, call release_rows().

    Args:
        groups: that are saved.

    Raises:
        RuntimeError: a disk is full, or fails.
    """
    for stored in _stores_of(groups):
        stored.hold()


def release_rows(groups: Sequence[GroupSource]) -> None:
    """Ends what :func:`hold_rows` has begun.

    Args:
        groups: that were saved.
    """
    for stored in _stores_of(groups):
        stored.release()


def _stores_of(groups: Sequence[GroupSource]) -> list[StoredRows]:
    """Each once, though several slabs of a group have their rows in it."""
    found = [slab.in_store for group in groups for slab in group.slabs]
    return list(dict.fromkeys(stored for stored in found if stored is not None))


__all__ = ["hold_rows", "release_rows"]
