"""The logical tables of a hash table, and where the rows of one lie."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ChildrenInfo(NamedTuple):
    """The logical tables of a :class:`HashTable`.

    Attributes:
        children: their names.
        is_coalesce: whether there may be several.
    """

    children: list[str]
    is_coalesce: bool


class IdsMap(NamedTuple):
    """Where rows lie.

    Attributes:
        ids: int64 [n], ascending.
        rows: int64 [n], their row numbers.
    """

    ids: Tensor
    rows: Tensor


__all__ = ["ChildrenInfo", "IdsMap"]
