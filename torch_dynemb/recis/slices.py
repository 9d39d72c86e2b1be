"""Slices: the ids of one of several shards of a table."""

from __future__ import annotations

from typing import NamedTuple

from torch_dynemb.argument_checks import integer
from torch_dynemb.distributed.owners import slots_of


class Slice(NamedTuple):
    """Slots of a table's ids: ``[slice_begin, slice_end)`` of ``slice_size``.

    Attributes:
        slice_begin: the first slot, at least 0.
        slice_end: the slot after the last, at most ``slice_size``.
        slice_size: number of slots into which ids are hashed.
    """

    slice_begin: int
    slice_end: int
    slice_size: int

    @property
    def whole(self) -> bool:
        """Whether it has all ids."""
        return (self.slice_begin, self.slice_end) == (0, self.slice_size)


def gen_slice(shard_index: int = 0, shard_num: int = 1, slice_size: int = 65536) -> Slice:
    """Return the contiguous slots of one of ``shard_num`` shards of about equal size.

    Args:
        shard_index: number of the shard, 0 to ``shard_num`` - 1.
        shard_num: number of shards, 1 to ``slice_size``.
        slice_size: number of slots into which ids are hashed, at least 1.

    Raises:
        TypeError: a number is not an int.
        ValueError: ``shard_index`` or another number is out of range, or there are more shards than
            slots.

    Example:
        >>> gen_slice(1, 3, 8)
        Slice(slice_begin=3, slice_end=6, slice_size=8)
    """
    shard_index = integer("gen_slice: shard_index", shard_index)
    shard_num = integer("gen_slice: shard_num", shard_num)
    slice_size = integer("gen_slice: slice_size", slice_size, least=1)
    if not 1 <= shard_num <= slice_size:
        raise ValueError(f"gen_slice: shard_num is {shard_num}, expected 1 to {slice_size}")
    if not 0 <= shard_index < shard_num:
        raise ValueError(f"gen_slice: shard_index is {shard_index}, expected 0 to {shard_num - 1}")
    slots = slots_of(shard_index, shard_num, slice_size)
    return Slice(slots.start, slots.stop, slice_size)


__all__ = ["Slice", "gen_slice"]
