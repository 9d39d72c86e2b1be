"""Slice of the ids that a hash table has, if other ranks have the rest."""

from __future__ import annotations

from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.recis.slices import Slice


def check_in_slice(owner: str, table_slice: Slice, ids: Tensor) -> None:
    """Raise ValueError if an id belongs to another slice; a check synchronizes a GPU.

    A slice with all ids needs no check.

    Args:
        owner: prefix of error messages.
        table_slice: slots of the table.
        ids: int64 [n].
    """
    if table_slice.whole:
        return
    begin, end, size = table_slice
    slots = ops.id_owners(ids, parts=size, slots=size)
    others = ids[(slots < begin) | (slots >= end)]
    if others.numel() > 0:
        raise ValueError(
            f"{owner}: ids has {others.numel()} ids of other slices, such as "
            f"{int(others[0])}: this table has slots {begin} to {end - 1} of {size}"
        )


__all__ = ["check_in_slice"]
