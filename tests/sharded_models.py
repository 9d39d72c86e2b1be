"""Models with collections of TorchRec, sharded over the ranks of the process group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    _get_parameter_sharding,
    _get_parameter_size_offsets,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    TableOptions,
)
from torch_dynemb.torchrec.planning.options import TableParams
from torch_dynemb.torchrec.sharding.kernels import DynamicKernel

BAG_SHARDINGS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_column_wise",
    "table_row_wise",
    "grid_shard",
)
SEQUENCE_SHARDINGS = ("table_wise", "row_wise", "column_wise")
FOUR_RANKS = ("table_row_wise", "grid_shard")  # which make little sense on a single node
STATIC_VALUE = 0.1  # what all rows of static tables start with


@dataclass(frozen=True)
class Table:
    """A table of a model.

    Attributes:
        pooling: ``"none"``: it is in the EmbeddingCollection, else in the EmbeddingBagCollection.
        sharding: as in ShardingType.
        dynamic: False: TorchRec's own kernel.
        written: whether DistributedModelParallel.write may write its rows.
    """

    name: str
    dim: int
    features: tuple[str, ...]
    pooling: str = "sum"
    sharding: str = "row_wise"
    dynamic: bool = True
    data_type: str = "FP32"
    num_embeddings: int = 7
    padding_idx: int | None = None
    columns_per_rank: tuple[int, ...] | None = None
    written: bool = False


class Model(nn.Module):
    """An EmbeddingBagCollection and an EmbeddingCollection, or one of them.

    With an attribute ``over``, that is a dense layer over all outputs.
    """

    def __init__(self, tables: Sequence[Table], weighted: bool) -> None:
        super().__init__()
        meta = torch.device("meta")
        pooled = [_config(table) for table in tables if table.pooling != "none"]
        unpooled = [_config(table) for table in tables if table.pooling == "none"]
        if pooled:
            self.bags = torchrec.EmbeddingBagCollection(pooled, is_weighted=weighted, device=meta)
        if unpooled:
            self.sequences = torchrec.EmbeddingCollection(unpooled, device=meta)

    def forward(self, features: torchrec.KeyedJaggedTensor) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}
        if hasattr(self, "bags"):
            outputs |= self.bags(features).to_dict()
        if hasattr(self, "sequences"):
            outputs |= {name: of.values() for name, of in self.sequences(features).items()}
        if hasattr(self, "over"):
            outputs = {name: self.over(of) for name, of in outputs.items()}
        return outputs


def _fill(weight: Tensor) -> None:
    nn.init.constant_(weight, STATIC_VALUE)


def _config(table: Table) -> Any:
    arguments: dict[str, Any] = {
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.dim,
        "name": table.name,
        "feature_names": list(table.features),
        "data_type": DataType[table.data_type],
        "init_fn": None if table.dynamic else _fill,
    }
    if table.written:
        arguments["enable_embedding_update"] = True
    if table.pooling == "none":
        return EmbeddingConfig(**arguments)
    return EmbeddingBagConfig(**arguments, pooling=PoolingType[table.pooling.upper()])


def _grid(hosts: int) -> Any:
    """TorchRec's grid_shard, which divides no table of less than 256 columns."""

    def generate(param: Tensor, local: int, world: int, device: str, sharder: Any) -> Any:
        columns = param.shape[1] // hosts
        offsets = _get_parameter_size_offsets(
            param, ShardingType.GRID_SHARD, local, world, col_wise_shard_dim=columns
        )
        shards = [(size, offset, rank) for rank, (size, offset) in enumerate(offsets)]
        return _get_parameter_sharding(param, "grid_shard", shards, local, device, sharder)

    return generate


def generator(
    sharding: str,
    kernel: str,
    number: int,
    columns: tuple[int, ...] | None = None,
    *,
    ranks: int | None = None,
) -> Any:
    """How construct_module_sharding_plan shards the ``number``-th table.

    Args:
        ranks: that share the table, all on one node; None: all ranks.
    """
    hosts = 1
    if ranks is None:
        ranks = dist.get_world_size()
        hosts = ranks // int(os.environ["LOCAL_WORLD_SIZE"])
    generate = {
        "table_wise": lambda: table_wise(rank=number % ranks),
        "row_wise": row_wise,
        "column_wise": lambda: (
            column_wise(ranks=list(range(ranks)))
            if columns is None
            else column_wise(size_per_rank=list(columns))
        ),
        "table_column_wise": lambda: column_wise(ranks=list(range(ranks))),
        "table_row_wise": lambda: table_row_wise(host_index=number % hosts),
        "grid_shard": lambda: _grid(hosts),
        "data_parallel": data_parallel,
    }[sharding]()

    def generated(*arguments: Any) -> Any:
        planned = generate(*arguments)
        planned.sharding_type = sharding
        planned.compute_kernel = kernel
        return planned

    return generated


def _kernel(table: Table) -> str:
    if table.dynamic:
        return "customized_kernel"
    return "dense" if table.sharding == "data_parallel" else "fused"


def module_plan(
    module: nn.Module, tables: Sequence[Table], sharder: Any, *, ranks: int | None = None
) -> Any:
    """The plan of a collection.

    Args:
        ranks: that share the tables, all on one node; None: all ranks.
    """
    generators = {
        table.name: generator(
            table.sharding, _kernel(table), number, table.columns_per_rank, ranks=ranks
        )
        for number, table in enumerate(tables)
    }
    return construct_module_sharding_plan(
        module,
        generators,
        sharder=sharder,
        local_size=ranks or int(os.environ["LOCAL_WORLD_SIZE"]),
        world_size=ranks or dist.get_world_size(),
        device_type="cpu",
    )


def plan_of(tables: Sequence[Table], model: Model | None = None, sharders: Any = None) -> Any:
    """The plan of a model with these tables, by collection."""
    model = Model(tables, False) if model is None else model
    if sharders is None:
        sharders = DynamicEmbeddingBagCollectionSharder(), DynamicEmbeddingCollectionSharder()
    plan = {}
    if hasattr(model, "bags"):
        of = [table for table in tables if table.pooling != "none"]
        plan["bags"] = module_plan(model.bags, of, sharders[0])
    if hasattr(model, "sequences"):
        of = [table for table in tables if table.pooling == "none"]
        plan["sequences"] = module_plan(model.sequences, of, sharders[1])
    return plan


def sharded(
    tables: Sequence[Table],
    *,
    fused_params: dict[str, Any] | None = None,
    optimizer: td.OptimizerConfig | None = None,
    options: dict[str, TableOptions] | None = None,
    weighted: bool = False,
    planned_options: dict[str, TableOptions] | None = None,
    prepare: Any = None,
    use_index_dedup: bool = False,
    reverses_plan: bool = False,
    kind: type[Model] = Model,
) -> DistributedModelParallel:
    """A sharded model.

    Args:
        fused_params, optimizer: of the sharders.
        options: of dynamic tables; default: a normal distribution for all.
        planned_options: of dynamic tables, in the plan.
        prepare: called with the unsharded model.
        use_index_dedup: of the sharders.
        reverses_plan: the plan has the tables in another order than the collections.
        kind: of the model.
    """
    model = kind(tables, weighted)
    if prepare is not None:
        prepare(model)
    if options is None:
        options = {
            table.name: TableOptions(initializer=td.Normal(), padding_idx=table.padding_idx)
            for table in tables
            if table.dynamic
        }
    sharders: list[Any] = [
        of(
            fused_params=fused_params,
            options=options,
            optimizer=optimizer,
            use_index_dedup=use_index_dedup,
        )
        for of in (DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder)
    ]
    plan = plan_of(tables, model, sharders)
    if reverses_plan:
        plan = {path: type(of)(dict(reversed(of.items()))) for path, of in plan.items()}
    for name, planned in (planned_options or {}).items():
        plan["bags"][name].key_value_params = TableParams(options=planned)
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan),
        sharders=sharders,
    )


def kernels(model: nn.Module) -> Iterator[DynamicKernel]:
    """All kernels of dynamic tables on this rank."""
    for module in model.modules():
        if hasattr(module, "kernels"):
            yield from module.kernels()


def output_names(tables: Sequence[Table]) -> list[tuple[str, Table, str]]:
    """Name of every output, its table and its feature."""
    features = [(feature, table) for table in tables for feature in table.features]
    times = [(feature, table.pooling == "none") for feature, table in features]
    return [
        (
            f"{feature}@{table.name}"
            if times.count((feature, table.pooling == "none")) > 1
            else feature,
            table,
            feature,
        )
        for feature, table in features
    ]
