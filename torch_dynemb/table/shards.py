"""Which ids and columns of a table a rank has."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops


class IdSlots(NamedTuple):
    """Which ids a part has: those whose slot, of so many that ids are dealt to, is in a range.

    See :func:`torch_dynemb.ops.id_owners`, which deals ids to slots.

    Attributes:
        begin, end: the range.
        slots: how many there are.
    """

    begin: int = 0
    end: int = 1
    slots: int = 1

    @property
    def whole(self) -> bool:
        """Whether it has all ids."""
        return self.begin == 0 and self.end == self.slots

    def owned(self, ids: Tensor) -> Tensor:
        """Which ids are its own.

        Args:
            ids: int64 [n], of the CPU.

        Returns:
            bool [n].
        """
        if self.whole:
            return torch.ones_like(ids, dtype=torch.bool)
        slots = ops.id_owners(ids.contiguous(), parts=self.slots, slots=self.slots)
        return (slots >= self.begin) & (slots < self.end)

    def shares(self, other: IdSlots) -> bool:
        """Whether an id may be of both.

        Args:
            other: slots of another part.
        """
        # An id of slot m modulo a and of slot n modulo b exists where m and n are equal modulo
        # what divides both a and b.
        common = math.gcd(self.slots, other.slots)
        return not self._modulo(common).isdisjoint(other._modulo(common))

    def _modulo(self, slots: int) -> set[int]:
        """Its slots, of fewer ones that divide theirs."""
        return {slot % slots for slot in range(self.begin, min(self.end, self.begin + slots))}


class TableShard(NamedTuple):
    """Some ids and columns of a table.

    Attributes:
        name: of the whole table.
        embedding_dim: columns of the whole table.
        columns: which of them it has.
        ids: which ids it has.
    """

    name: str
    embedding_dim: int
    columns: range
    ids: IdSlots = IdSlots()

    @property
    def first_column(self) -> int:
        """Its first column in the rows of the whole table."""
        return self.columns.start

    @property
    def split(self) -> bool:
        """Whether other shards have other columns of its ids."""
        return len(self.columns) < self.embedding_dim


__all__ = ["IdSlots", "TableShard"]
