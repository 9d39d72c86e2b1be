"""Which of several shards of a table has an id."""

from __future__ import annotations

from typing import NamedTuple

from torch_dynemb.argument_checks import integer
from torch_dynemb.distributed.owners import slots_of


class Slice(NamedTuple):
    """The slots of ids that a table has: ``[slice_begin, slice_end)`` of ``slice_size``.

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
    """The slots of one of ``shard_num`` shards: contiguous, of equal numbers but for one.

    Args:
        shard_index: number of the shard, 0 to ``shard_num`` - 1.
        shard_num: how many shards there are, 1 to ``slice_size``.
        slice_size: number of slots into which ids are hashed, at least 1.

    Raises:
        TypeError: a number is no int.
        ValueError: ``shard_index`` is no shard, there are more shards than slots, or a number is
            too small.

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
