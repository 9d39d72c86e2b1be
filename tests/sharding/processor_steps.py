"""Collections with feature processors, on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sharded_models
import torch
import torch.distributed as dist
from sharded_models import Table
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingShardingPlanner,
    TableOptions,
)

CPU = torch.device("cpu")
_START = 0.5  # of all rows


def _start(weight: Tensor) -> None:
    nn.init.constant_(weight, _START)


class Model(nn.Module):
    """Two tables, one feature each, with weights of positions, and a dense layer over the bags."""

    def __init__(self, pooling: str) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"table_{feature}",
                embedding_dim=8,
                num_embeddings=20,
                feature_names=[feature],
                pooling=PoolingType[pooling],
                init_fn=_start,
            )
            for feature in ("a", "b")
        ]
        bags = EmbeddingBagCollection(tables, is_weighted=True, device=torch.device("meta"))
        positions = {name: PositionWeightedModule(4, CPU) for name in ("a", "b")}
        self.bags = FeatureProcessedEmbeddingBagCollection(bags, positions)
        self.over = nn.Linear(8, 1)
        nn.init.constant_(self.over.weight, 1.0)
        nn.init.constant_(self.over.bias, 0.0)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        bags = self.bags(features).to_dict()
        return self.over(torch.stack([bags["a"], bags["b"]]))


def sharded(
    sharding: str, *, dynamic: bool, processed: bool = True, pooling: str = "SUM", **options: Any
) -> DistributedModelParallel:
    """A sharded model with position weights.

    Args:
        dynamic: whether its tables are.
        processed: whether the collection has a sharder of its own.
        options: of the sharder.
    """
    constraint = ParameterConstraints(sharding_types=[sharding], min_partition=4)
    constraints = {"table_a": constraint, "table_b": constraint}
    if dynamic:
        rows = TableOptions(initializer=td.Constant(_START))
        options = {"tables": "all", "options": rows, "optimizer": td.SGD(lr=0.1), **options}
        inner: Any = DynamicEmbeddingBagCollectionSharder(**options)
        planner: Any = DynamicEmbeddingShardingPlanner(constraints=constraints)
    else:
        inner = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
        topology = Topology(dist.get_world_size(), "cpu")
        planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    sharders = [FeatureProcessedEmbeddingBagCollectionSharder(inner) if processed else inner]
    model = Model(pooling)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)


def trained(rank: int, sharding: str, dynamic: bool, folder: str) -> list[list[float]]:
    """Outputs of three steps, then the dense parameters, which include the position weights.

    A dynamic model is saved and loaded, and a frozen copy gives the same.

    Args:
        folder: of the checkpoints.
    """
    model = sharded(sharding, dynamic=dynamic)
    dense = {n: of for n, of in model.named_parameters() if "embedding_bags" not in n}
    optimizer = torch.optim.SGD(dense.values(), lr=0.01)
    seen = []
    for step in range(3):
        ids = (torch.arange(10) * (rank + 2) + step) % 20
        batch = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([2, 4, 3, 1]))
        output = model(batch)
        seen.append(output.flatten().tolist())
        optimizer.zero_grad()
        output.square().sum().backward()
        optimizer.step()
    if dynamic:
        td.checkpoint.save(f"{folder}/{sharding}", model)
        td.checkpoint.load(f"{folder}/{sharding}", model)
    with torch.no_grad():
        expected = model.eval()(batch)
        served = td.freeze(model)(batch) if dynamic else expected
    torch.testing.assert_close(served, expected)
    return seen + [dense[name].flatten().tolist() for name in sorted(dense)]


def refused(rank: int, sharding: str, options: dict[str, Any]) -> str:
    """What is raised when a model is sharded, or by its first batch."""
    return _raised(lambda: sharded(sharding, dynamic=True, **options)(_jagged()))


def weights_refused(rank: int) -> list[str]:
    """What a weighted collection raises for batches without weights, and with gradients of them.

    Its only table is on rank 0.
    """
    model = sharded_models.sharded([Table("users", 8, ("a",), "sum", "table_wise")], weighted=True)
    weights = torch.ones(4, requires_grad=True)
    return [
        _raised(lambda batch=batch: model(batch)) for batch in (_jagged(), _jagged(weights=weights))
    ]


def _jagged(**weights: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.ones(4).int(), **weights)


def _raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
