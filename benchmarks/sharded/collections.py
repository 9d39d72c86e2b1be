"""Sharded collections of static and dynamic tables, and their training steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common.id_streams import spread
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

import torch_dynemb as td
from torch_dynemb.torchrec import DynamicEmbeddingBagCollectionSharder, TableOptions
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL

WORLD_SIZE = 2
LEARNING_RATE, EPS = 0.01, 1e-8
FILL_BAGS = 16_384  # of a rank in a step that fills tables
SHARDINGS = ("row_wise", "table_wise")
OPTIMIZERS = {
    "RowWiseAdagrad": (EmbOptimType.EXACT_ROWWISE_ADAGRAD, td.RowWiseAdagrad),
    "SGD": (EmbOptimType.EXACT_SGD, td.SGD),
}
Step = Callable[[KeyedJaggedTensor], None]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a measurement, and how often it is done.

    Attributes:
        tables, rows, dim: tables, ids of each and their columns.
        batch: bags of a table on one rank.
        bags: ids of a bag; every size is measured.
        new_share: share of new ids in the steps in which new ids arrive.
        rounds, calls: rounds, and steps of each in a round.
    """

    tables: int
    rows: int
    dim: int
    batch: int
    bags: tuple[int, ...]
    new_share: float
    rounds: int
    calls: int

    @property
    def names(self) -> list[str]:
        """The tables, which are also the features."""
        return [f"table{t}" for t in range(self.tables)]


def training_step(
    sizes: Sizes, sharding: str, optimizer: str, *, dedup: bool | None
) -> tuple[DistributedModelParallel, Step]:
    """Return a sharded collection and one training step of it.

    Args:
        sizes: of the tables.
        sharding: one of :data:`SHARDINGS`; table_wise puts the tables on the ranks in turn.
        optimizer: a key of :data:`OPTIMIZERS`.
        dedup: None: static tables, TorchRec's fused kernel; else dynamic ones, and whether every id
            of a batch is sent once.
    """
    stock, ours = OPTIMIZERS[optimizer]
    sharder: Any
    if dedup is None:
        kernel = EmbeddingComputeKernel.FUSED.value
        fused = {"optimizer": stock, "learning_rate": LEARNING_RATE, "eps": EPS}
        sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    else:
        kernel = DYNAMIC_KERNEL
        more = {} if optimizer == "SGD" else {"eps": EPS}
        sharder = dynamic_sharder(sizes, ours(lr=LEARNING_RATE, **more), dedup=dedup)
    generators = {
        name: row_wise(compute_kernel=kernel)
        if sharding == "row_wise"
        else table_wise(rank=t % WORLD_SIZE, compute_kernel=kernel)
        for t, name in enumerate(sizes.names)
    }
    return step_of_plan(sizes, sharder, generators)


def dynamic_sharder(sizes: Sizes, optimizer: Any, *, dedup: bool) -> Any:
    """Return the sharder of dynamic tables."""
    return DynamicEmbeddingBagCollectionSharder(
        use_index_dedup=dedup,
        options={name: TableOptions() for name in sizes.names},
        optimizer=optimizer,
    )


def step_of_plan(
    sizes: Sizes, sharder: Any, generators: Mapping[str, Any]
) -> tuple[DistributedModelParallel, Step]:
    """Return a collection with a sharding of each table, and one training step of it.

    Args:
        sizes: of the tables.
        sharder: of the collection.
        generators: of the sharding of each table, by name.
    """
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=sizes.dim,
                num_embeddings=sizes.rows,
                feature_names=[name],
                weight_init_min=-0.01,
                weight_init_max=0.01,
            )
            for name in sizes.names
        ],
        device=torch.device("meta"),
    )
    plan = construct_module_sharding_plan(
        module,
        dict(generators),
        sharder=sharder,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    model = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )
    gradients: dict[int, Tensor] = {}

    def step(features: KeyedJaggedTensor) -> None:
        output = model(features).values()
        batch = output.shape[0]
        if batch not in gradients:
            gradients[batch] = torch.randn(output.shape)
        output.backward(gradients[batch])

    return model, step


def jagged(sizes: Sizes, ids: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
    """Return a batch as a data loader hands it over: nothing derived from it is cached yet."""
    return KeyedJaggedTensor(keys=sizes.names, values=ids, lengths=lengths)


def fill(sizes: Sizes, step: Step, rank: int) -> None:
    """Train a dynamic table with every id of its streams, so that none is new."""
    mine = torch.arange(rank, sizes.rows, WORLD_SIZE)
    for begin in range(0, -(-sizes.rows // WORLD_SIZE), FILL_BAGS):
        ids = spread(mine[begin : begin + FILL_BAGS])
        bags = min(FILL_BAGS, -(-sizes.rows // WORLD_SIZE) - begin)
        lengths = torch.zeros(bags, dtype=torch.int64)
        lengths[: len(ids)] = 1
        step(jagged(sizes, ids.repeat(sizes.tables), lengths.repeat(sizes.tables)))
