"""Shards of a table: the ids and columns of one rank."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops


class IdSlots(NamedTuple):
    """The ids of a part: those with a slot in a range.

    :func:`torch_dynemb.ops.id_owners` gives each id a slot.

    Attributes:
        begin, end: the range.
        slots: number of all slots.
    """

    begin: int = 0
    end: int = 1
    slots: int = 1

    @property
    def whole(self) -> bool:
        """Whether the part has all ids."""
        return self.begin == 0 and self.end == self.slots

    def owned(self, ids: Tensor) -> Tensor:
        """Return which ids belong to the part.

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
        """Return whether both parts can have the same id.

        Args:
            other: slots of another part.
        """
        # An id with slot m modulo a and slot n modulo b exists if m and n are equal modulo
        # gcd(a, b).
        common = math.gcd(self.slots, other.slots)
        return not self._modulo(common).isdisjoint(other._modulo(common))

    def _modulo(self, slots: int) -> set[int]:
        """Return the slots modulo a divisor of their number."""
        return {slot % slots for slot in range(self.begin, min(self.end, self.begin + slots))}


class TableShard(NamedTuple):
    """Some ids and columns of a table.

    Attributes:
        name: of the whole table.
        embedding_dim: columns of the whole table.
        columns: of the shard.
        ids: of the shard.
    """

    name: str
    embedding_dim: int
    columns: range
    ids: IdSlots = IdSlots()

    @property
    def first_column(self) -> int:
        """First column of the shard in rows of the whole table."""
        return self.columns.start

    @property
    def split(self) -> bool:
        """Whether other shards have other columns of the same ids."""
        return len(self.columns) < self.embedding_dim


__all__ = ["IdSlots", "TableShard"]
