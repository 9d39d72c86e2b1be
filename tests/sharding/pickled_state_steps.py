"""What the ranks of test_pickled_state do: ``torch.save`` and ``torch.load`` of state dicts."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from checkpoint_models import Kind, Shard, sharded_model, shards_of, train
from checkpoint_steps import names_of
from torch.distributed._shard.sharded_tensor.api import ShardedTensor


def saved_and_loaded(
    rank: int, kinds: Sequence[Kind], optimizer: str, folder: str, copied: bool
) -> tuple[list[Shard], list[Shard], list[Shard], list[Shard]]:
    """Shards when they are saved and when they are loaded, and both after more training."""
    old = sharded_model(kinds, 0, optimizer)
    train(old, rank, names_of(kinds), range(3))
    state = old.state_dict()
    torch.save(copy.deepcopy(state) if copied else state, f"{folder}/rank{rank}.pt")
    saved = shards_of(old)
    new = sharded_model(kinds, 1, optimizer)
    train(new, rank, names_of(kinds), range(2, 3))
    new.load_state_dict(torch.load(f"{folder}/rank{rank}.pt", weights_only=True))
    loaded = shards_of(new)
    for model in (old, new):
        train(model, rank, names_of(kinds), range(3, 5))
    return saved, loaded, shards_of(old), shards_of(new)


def loaded_error(rank: int, path: str, destroy: bool = False) -> str:
    """The error of ``torch.load``, maybe without a process group."""
    if destroy:
        dist.destroy_process_group()
    try:
        torch.load(path, weights_only=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def loaded_in_group(rank: int, kinds: Sequence[Kind], folder: str) -> tuple[int, bool]:
    """Size of the group of an entry that is loaded for a group; whether it has the same values."""
    from torch.distributed._shard import load_with_process_group

    model = sharded_model(kinds, 0, "sgd")
    train(model, rank, names_of(kinds), range(2))
    state = model.state_dict()
    torch.save(state, f"{folder}/group{rank}.pt")
    group = dist.new_group(backend="gloo")
    with load_with_process_group(group):
        read = torch.load(f"{folder}/group{rank}.pt", weights_only=True)
    same = True
    for name, value in state.items():
        if isinstance(value, ShardedTensor):
            same = same and read[name].size() == value.size()
            same = same and read[name]._process_group is group
            for one, other in zip(read[name].local_shards(), value.local_shards(), strict=True):
                same = same and torch.equal(one.tensor, other.tensor)
                same = same and one.metadata == other.metadata
    return len(state), same
