"""Logical tables of a hash table, and positions of their rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ChildrenInfo(NamedTuple):
    """Logical tables of a :class:`HashTable`.

    Attributes:
        children: their names.
        is_coalesce: whether there may be several.
    """

    children: list[str]
    is_coalesce: bool


class IdsMap(NamedTuple):
    """Row numbers of ids.

    Attributes:
        ids: int64 [n], ascending.
        rows: int64 [n], their row numbers.
    """

    ids: Tensor
    rows: Tensor


__all__ = ["ChildrenInfo", "IdsMap"]
