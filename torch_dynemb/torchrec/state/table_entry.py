"""Entries of a state dict in a form that ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.api import _get_current_process_group
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

# offsets and sizes of a shard, and its placement
Tile = tuple[list[int], list[int], str]


class TableEntry(ShardedTensor):
    """ShardedTensor that pickles as plain tensors, numbers and strings.

    torch pickles a ShardedTensor with classes and functions that ``torch.load`` refuses under its
    default ``weights_only=True``. This class pickles a call of :func:`rebuild_entry`, which is
    registered as safe: it only makes a ShardedTensor of its arguments.
    """

    @classmethod
    def of(
        cls,
        local: Sequence[LocalShard],
        metadata: ShardedTensorMetadata,
        process_group: dist.ProcessGroup,
    ) -> TableEntry:
        """Make an entry of the shards of this rank, without communication.

        Args:
            local: shards of this rank.
            metadata: of all shards.
            process_group: of the ranks with shards.
        """
        entry: Any = ShardedTensor._init_from_local_shards_and_global_metadata(
            list(local), metadata, process_group=process_group
        )
        entry.__class__ = cls  # the constructor makes ShardedTensors only
        return entry  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> TableEntry:
        copy: Any = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copy.__class__ = TableEntry
        return copy  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., TableEntry], tuple[Any, ...]]:
        def tile(of: ShardMetadata) -> Tile:
            return list(of.shard_offsets), list(of.shard_sizes), str(of.placement)

        metadata = self.metadata()
        return rebuild_entry, (
            [(shard.tensor, tile(shard.metadata)) for shard in self.local_shards()],
            [tile(shard) for shard in metadata.shards_metadata],
            list(metadata.size),
            metadata.tensor_properties.dtype,
            dist.get_rank(self._process_group),
            dist.get_world_size(self._process_group),
        )


def rebuild_entry(
    local: list[tuple[Tensor, Tile]],
    tiles: list[Tile],
    size: list[int],
    dtype: torch.dtype,
    rank: int,
    world_size: int,
) -> TableEntry:
    """Make the entry that a pickle has; each rank reads its own pickle.

    The process group is the default one, or that of torch's ``load_with_process_group``.

    Args:
        local: shards of this rank: tensor [rows, columns], and place.
        tiles: places of all shards.
        size: of the whole entry.
        dtype: of the entry.
        rank, world_size: in the process group that wrote the pickle.

    Raises:
        RuntimeError: the process group is missing, or has another rank or another number of ranks.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.load: the file has a state dict of sharded tables, but the process group is "
            "missing: call torch.distributed.init_process_group first"
        )
    group = _get_current_process_group()
    here = dist.get_rank(group), dist.get_world_size(group)
    if here != (rank, world_size):
        raise RuntimeError(
            f"torch.load: rank {rank} of {world_size} wrote the file with a state dict of sharded "
            f"tables, but rank {here[0]} of {here[1]} reads it: give each rank its own file and "
            "start as many ranks, or save with torch_dynemb.checkpoint.save, which loads on any "
            "number of ranks"
        )

    def metadata(tile: Tile) -> ShardMetadata:
        offsets, sizes, placement = tile
        return ShardMetadata(shard_offsets=offsets, shard_sizes=sizes, placement=placement)

    return TableEntry.of(
        [LocalShard(tensor, metadata(tile)) for tensor, tile in local],
        ShardedTensorMetadata(
            [metadata(tile) for tile in tiles], torch.Size(size), TensorProperties(dtype=dtype)
        ),
        group,
    )


torch.serialization.add_safe_globals([rebuild_entry])

__all__ = ["TableEntry", "rebuild_entry"]
