"""torch.distributed.checkpoint with dynamic tables: the checkpoint says how many rows there are."""

from __future__ import annotations

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
    """Loads the entries of dynamic tables with as many rows as the checkpoint has.

    Every rank reads an equal part of the rows, whoever owns them; ``model.load_state_dict`` sends
    them to their owners. Other entries are loaded as by DefaultLoadPlanner.

    Args:
        process_group: of the ranks that load; default: all.
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
        # in the nested dicts themselves: the base class flattens them, more than once
        flat, mappings = flatten_state_dict(state_dict)
        found = (key.removesuffix("weight_id") for key in flat)
        tables = [start for start in found if f"{start}layout" in flat]
        for key, value in flat.items():
            entry = metadata.state_dict_metadata.get(key)
            if not any(key.startswith(table) for table in tables):
                continue
            if isinstance(entry, TensorStorageMetadata):  # else the base class says what is missing
                set_element(state_dict, mappings[key], self._resized(value, entry))
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def _resized(self, value: Any, entry: TensorStorageMetadata) -> Any:
        """An empty entry of the saved size; its rows are spread over the ranks."""
        dtype = entry.properties.dtype
        if not isinstance(value, ShardedTensor):
            return torch.empty(entry.size, dtype=dtype)
        process_group = self._process_group
        ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        rows, columns = entry.size
        device = _device_of(value, process_group)
        shards, local = [], []
        for r in range(ranks):
            of_rank = rows_of(r, ranks, rows)
            if not of_rank and (rows > 0 or r > 0):
                continue  # a ShardedTensor has at least one shard, also of no rows
            holder = r if process_group is None else dist.get_global_rank(process_group, r)
            size = [len(of_rank), columns]
            metadata = ShardMetadata([of_rank.start, 0], size, placement_of(holder, device))
            shards.append(metadata)
            if r == rank:
                empty = torch.empty(size, dtype=dtype, device=device)
                local.append(Shard(empty, metadata))
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            local,
            ShardedTensorMetadata(shards, torch.Size([rows, columns]), TensorProperties(dtype)),
            process_group=process_group,
        )


def _device_of(value: ShardedTensor, process_group: dist.ProcessGroup | None) -> torch.device:
    """Where the entry's shards lie; without any, where the process group takes tensors."""
    kind = "cpu" if dist.get_backend(process_group) == "gloo" else "cuda"
    for shard in value.local_shards():
        kind = shard.tensor.device.type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


__all__ = ["LoadPlanner"]
