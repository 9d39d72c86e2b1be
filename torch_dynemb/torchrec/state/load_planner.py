"""Load planner of torch.distributed.checkpoint that takes table sizes from the checkpoint."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_dynemb.distributed.owners import rows_of
from torch_dynemb.torchrec.state.shard_places import placement_of


class LoadPlanner(DefaultLoadPlanner):
    """Load planner that gives entries of dynamic tables as many rows as the checkpoint has.

    If as many ranks share a table's rows as when it was saved, each rank reads the rows that it
    owns. Otherwise each rank reads an about equal part, and ``model.load_state_dict`` sends the
    rows to their owners. Other entries are loaded as by DefaultLoadPlanner.

    Args:
        process_group: of the loading ranks; default: all.
        **arguments: of DefaultLoadPlanner.

    Example::

        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path, planner=LoadPlanner())
        model.load_state_dict(state["model"])
    """

    def __init__(self, *, process_group: dist.ProcessGroup | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._process_group = process_group

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        _take_saved_sizes(state_dict, metadata, self._process_group)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def take_saved_sizes(planner: Any, state_dict: dict[str, Any], metadata: Metadata) -> None:
    """Give entries of other sizes than the saved ones as many rows as the checkpoint has.

    Args:
        planner: of a load on all ranks.
        state_dict: nested dicts, in which entries are replaced.
        metadata: of the checkpoint.
    """
    if not isinstance(planner, LoadPlanner):  # which has done so
        _take_saved_sizes(state_dict, metadata, None, only_others=True)


def _take_saved_sizes(
    state_dict: dict[str, Any],
    metadata: Metadata,
    process_group: dist.ProcessGroup | None,
    *,
    only_others: bool = False,
) -> None:
    """Replace entries in the nested dicts themselves, because planners flatten them repeatedly.

    Args:
        state_dict: nested dicts.
        metadata: of the checkpoint.
        process_group: of the loading ranks; None: all.
        only_others: leave entries of the saved sizes as they are.
    """
    flat, mappings = flatten_state_dict(state_dict)
    tables = table_prefixes(flat)
    owners = {table: _owners_of(flat, table) for table in tables}
    for key in list(flat):
        value = flat.pop(key)  # frees the replaced value at once
        entry = metadata.state_dict_metadata.get(key)
        table = next((start for start in tables if key.startswith(start)), None)
        # planners report missing entries
        if table is None or not isinstance(entry, TensorStorageMetadata):
            continue
        if only_others and value.size() == entry.size:
            continue
        resized = _resized(value, entry, owners[table], process_group)
        set_element(state_dict, mappings[key], resized)


def _resized(
    value: Any,
    entry: TensorStorageMetadata,
    owners: list[int],
    process_group: dist.ProcessGroup | None,
) -> Any:
    """Return an empty entry of the saved size, with rows spread over the ranks."""
    dtype = entry.properties.dtype
    if not isinstance(value, ShardedTensor):
        return torch.empty(entry.size, dtype=dtype, device="cpu")
    ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    rows, columns = entry.size
    device = _device_of(value, process_group)
    members = dist.get_process_group_ranks(process_group)
    known = set(owners) <= set(members)  # otherwise the table is sharded over other ranks
    parts = rows_by_rank(entry, [members.index(of) for of in owners] if known else [], ranks)
    shards, local = [], []
    for r, of_rank in enumerate(parts):
        if not of_rank and (rows > 0 or r > 0):
            continue  # a ShardedTensor has at least one shard, even if empty
        size = [len(of_rank), columns]
        metadata = ShardMetadata([of_rank.start, 0], size, placement_of(members[r], device))
        shards.append(metadata)
        if r == rank:
            empty = torch.empty(size, dtype=dtype, device=device)
            local.append(Shard(empty, metadata))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local,
        ShardedTensorMetadata(shards, torch.Size([rows, columns]), TensorProperties(dtype)),
        process_group=process_group,
    )


def table_prefixes(flat: dict[str, Any]) -> list[str]:
    """Return the common prefixes of the entries of each dynamic table.

    Args:
        flat: a state dict without nested dicts.
    """
    found = (key.removesuffix("weight_id") for key in flat)
    return [start for start in found if f"{start}layout" in flat]


def _owners_of(flat: dict[str, Any], table: str) -> list[int]:
    """Return the ranks of the parts of a table's rows; empty if its columns are sharded, too.

    Args:
        flat: entries of the loading model, which may have no rows.
        table: prefix of the table's entries.
    """
    bucket, weight = flat.get(f"{table}bucket"), flat.get(f"{table}weight")
    if not isinstance(bucket, ShardedTensor) or not isinstance(weight, ShardedTensor):
        return []
    if len({shard.shard_offsets[1] for shard in weight.metadata().shards_metadata}) > 1:
        return []
    parts = sorted(bucket.metadata().shards_metadata, key=lambda shard: shard.shard_offsets[0])
    ranks = [shard.placement.rank() for shard in parts if shard.placement is not None]
    return [rank for rank in ranks if rank is not None]


def rows_by_rank(entry: TensorStorageMetadata, owners: list[int], ranks: int) -> list[range]:
    """Return the rows of an entry that each rank reads.

    Reading a part of a saved piece reads its whole file, so cuts are moved to ends of pieces if one
    is near.

    Args:
        entry: of a checkpoint; each chunk was saved by one rank.
        owners: ranks of the parts of the table now; empty if unknown.
    """
    rows = entry.size[0]
    ends = sorted({chunk.offsets[0] + chunk.sizes[0] for chunk in entry.chunks})
    if len(owners) == 1 or (owners and len(set(owners)) == len(owners) == len(ends)):
        pieces = [rows] if len(owners) == 1 else ends
        result = [range(0)] * ranks
        for owner, begin, end in zip(owners, [0, *pieces], pieces, strict=False):
            result[owner] = range(begin, end)
        return result
    cuts = [0]
    for rank in range(ranks):
        cut = rows_of(rank, ranks, rows).stop
        nearest = min(ends, key=lambda end: abs(end - cut), default=cut)
        cuts.append(nearest if 4 * ranks * abs(nearest - cut) <= rows else cut)
    return [range(begin, end) for begin, end in itertools.pairwise(cuts)]


def _device_of(value: ShardedTensor, process_group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of an entry's shards; without shards, that of the process group's
    tensors."""
    kind = "cpu" if dist.get_backend(process_group) == "gloo" else "cuda"
    for shard in value.local_shards():
        kind = shard.tensor.device.type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


__all__ = ["LoadPlanner", "rows_by_rank", "table_prefixes", "take_saved_sizes"]
