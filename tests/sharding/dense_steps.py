"""What the ranks of test_dense_parts do: models with tables of TorchRec's, and sharded layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from checkpoint_models import Kind, sharded_model, train
from checkpoint_steps import names_of, raised_by
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D

import torch_dynemb as td
from torch_dynemb.table.dense_state import dense_only


def _env(output_dtensor: bool) -> Any:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    env = ShardingEnv(ranks, rank, dist.group.WORLD, output_dtensor=output_dtensor)
    return mock.patch.object(ShardingEnv, "from_process_group", return_value=env)


def _whole(model: nn.Module) -> dict[str, Tensor]:
    """The dense part, with whole tensors in place of shards."""
    with dense_only():
        state = model.state_dict()
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, ShardedTensor):
            whole = torch.zeros(value.size())
            value.gather(out=whole if dist.get_rank() == 0 else None)
            result[name] = whole
        elif isinstance(value, DTensor):
            whole = torch.zeros(value.shape)
            local: Any = value.to_local()
            for tensor, (row, column) in zip(
                local.local_shards(), local.local_offsets(), strict=False
            ):
                whole[row : row + tensor.shape[0], column : column + tensor.shape[1]] = tensor
            dist.all_reduce(whole)
            result[name] = whole
        else:
            result[name] = value.detach().clone()
    return result


def static_tables(
    rank: int, kinds: Sequence[Kind], path: str, output_dtensor: tuple[bool, bool]
) -> list[dict[str, Tensor]]:
    """The dense part that is saved, and what another model has before it loads it, after it, and
    after more training."""
    with _env(output_dtensor[0]):
        saved = sharded_model(kinds, 0, "sgd")
    train(saved, rank, names_of(kinds), range(3))
    with torch.no_grad():  # copies on every rank are not trained here
        for name, parameter in saved.named_parameters():
            if "copied" in name:
                parameter.fill_(3.0)
    td.checkpoint.save(path, saved, asynchronous=output_dtensor[1]).wait()
    with _env(output_dtensor[1]):
        loaded = sharded_model(kinds, 1, "sgd", seed=1)
    train(loaded, rank, names_of(kinds), range(7, 8))
    before = _whole(loaded)
    td.checkpoint.load(path, loaded)
    after = _whole(loaded)
    train(loaded, rank, names_of(kinds), range(1))
    return [_whole(saved), before, after, _whole(loaded)]


class _Layers(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 7)
        self.register_buffer("seen", torch.tensor(seed))


def sharded_layers(rank: int, path: str) -> list[dict[str, Tensor]]:
    """The layers that are saved as DTensors, and what a model has that loads them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def layers(seed: int) -> nn.Module:
        model = _Layers(seed)
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def whole(model: nn.Module) -> dict[str, Tensor]:
        return {
            name: of.full_tensor() if isinstance(of, DTensor) else of.clone()
            for name, of in model.state_dict().items()
        }

    saved, loaded = layers(3), layers(4)
    td.checkpoint.save(path, saved)
    td.checkpoint.load(path, loaded)
    return [whole(saved), whole(loaded)]


def two_dimensions(rank: int, kinds: Sequence[Kind]) -> str:
    """What is raised for dynamic tables of several groups of ranks."""
    env = object.__new__(ShardingEnv2D)
    vars(env).update(vars(ShardingEnv.from_process_group(dist.group.WORLD)))
    env.sharding_pg = env.process_group
    with mock.patch.object(ShardingEnv, "from_process_group", return_value=env):
        return raised_by(lambda: sharded_model(kinds, 0, "sgd"))
