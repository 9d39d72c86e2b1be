"""Slice of the ids that a hash table has, if other ranks have the rest."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.recis.slices import Slice

SLICE = "slice"  # the entry of a table's state


def check_in_slice(owner: str, own: Slice, ids: Tensor) -> None:
    """Raise ValueError if an id belongs to another slice; a check synchronizes a GPU.

    A slice with all ids needs no check.

    Args:
        owner: prefix of error messages.
        own: slots of the table.
        ids: int64 [n].
    """
    if own.whole:
        return
    begin, end, size = own
    slots = ops.id_owners(ids, parts=size, slots=size)
    others = ids[(slots < begin) | (slots >= end)]
    if others.numel() > 0:
        raise ValueError(
            f"{owner}: ids has {others.numel()} ids of other slices, such as "
            f"{int(others[0])}: this table has slots {begin} to {end - 1} of {size}"
        )


def saved_slice(entry: Any) -> Any:
    """Return the slice in an entry of a state; other values are returned unchanged."""
    bounds = entry.tolist() if isinstance(entry, Tensor) and not entry.is_meta else entry
    is_slice = (
        isinstance(bounds, list)
        and len(bounds) == len(Slice._fields)
        and all(type(bound) is int for bound in bounds)
    )
    return Slice(*bounds) if is_slice else bounds


__all__ = ["SLICE", "check_in_slice", "saved_slice"]
