"""TorchRec's own test of sharding, inside a process group that is already there.

It loads the rows of a static model into the sharded one, trains both and compares predictions.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_models import generator
from static_rows import insert_static_rows
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.test_utils.test_model import TestSparseNN
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from uneven_gather import uneven_gather

import torch_dynemb as td
from torch_dynemb.torchrec import DynamicEmbeddingBagCollectionSharder, TableOptions

# imported by TorchRec's test, for a name that it uses elsewhere; the wheels do not have it
_MISSING = "torchrec.distributed.tests.test_sequence_model"

# a host has no tables if there is one table, and several hosts
ONE_TABLE = "one table, constant_vbe"
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "variable_batch": {"variable_batch_size": True},
    "vbe": {"variable_batch_per_feature": True},
    "constant_vbe": {"variable_batch_per_feature": True, "global_constant_batch": True},
    "offsets": {"use_offsets": True},
    "int32": {
        "indices_dtype": torch.int32,
        "offsets_dtype": torch.int32,
        "lengths_dtype": torch.int32,
    },
    "int32_offsets": {
        "use_offsets": True,
        "indices_dtype": torch.int32,
        "offsets_dtype": torch.int32,
        "lengths_dtype": torch.int32,
    },
}


def _tables(pooling: str, prefix: str = "", count: int = 4) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            num_embeddings=11 * (i + 1),
            embedding_dim=16,
            name=f"{prefix}table_{i}",
            feature_names=[f"{prefix}feature_{i}"],
            pooling=PoolingType[pooling.upper()],
        )
        for i in range(count)
    ]


class _Planner:
    """In place of TorchRec's: the sharding type and kernel that are tested, for all tables."""

    def __init__(self, sharding: str, kernel: str, local_size: int) -> None:
        self._sharding, self._kernel, self._local_size = sharding, kernel, local_size

    def collective_plan(self, model: nn.Module, sharders: Sequence[Any], pg: Any) -> ShardingPlan:
        return ShardingPlan(
            {
                name: construct_module_sharding_plan(
                    module,
                    {
                        config.name: generator(self._sharding, self._kernel, number)
                        for number, config in enumerate(module.embedding_bag_configs())
                    },
                    sharder=sharders[0],
                    local_size=self._local_size,
                    world_size=pg.size(),
                    device_type="cpu",
                )
                for name, module in model.named_modules()
                if isinstance(module, EmbeddingBagCollection)
            }
        )


def conforms(
    rank: int, sharding: str, pooling: str, case: str, kernel: str, local_size: int
) -> None:
    """Runs a case of TorchRec's test.

    Args:
        kernel: ``"customized_kernel"``, or ``"fused"``: TorchRec's own.

    Raises:
        AssertionError: predictions differ.
    """
    with mock.patch.dict(sys.modules, {_MISSING: types.ModuleType(_MISSING)}):
        sys.modules[_MISSING].TestEmbeddingCollectionSharder = object  # type: ignore[attr-defined]
        from torchrec.distributed.test_utils import test_sharding

    of_case = CASES["constant_vbe" if case == ONE_TABLE else case]
    tables = _tables(pooling, count=1 if case == ONE_TABLE else 4)
    # the batches that TorchRec generates with a size per feature have no weights
    weighted = None if case.endswith("vbe") else _tables("sum", "weighted_", 2)
    fused_params = {"learning_rate": 0.1}
    if kernel == "fused":
        sharder: Any = EmbeddingBagCollectionSharder(fused_params=fused_params)
    else:
        sharder = DynamicEmbeddingBagCollectionSharder(
            fused_params=fused_params,
            options={table.name: TableOptions() for table in [*tables, *(weighted or [])]},
            optimizer=td.SGD(lr=0.1),
        )
    sharded: list[nn.Module] = []

    class Recorded(test_sharding.DistributedModelParallel):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            sharded.append(self)

    copy = test_sharding.copy_state_dict

    def copied(local: dict[str, Any], whole: dict[str, Tensor], **more: Any) -> None:
        dynamic = kernel != "fused"
        if dynamic:
            insert_static_rows(sharded[0], whole)
        copy(
            {k: v for k, v in local.items() if not (dynamic and "embedding_bags." in k)},
            whole,
            **more,
        )

    planner = _Planner(sharding, kernel, local_size)
    with (
        mock.patch.object(test_sharding, "DistributedModelParallel", Recorded),
        mock.patch.object(test_sharding, "copy_state_dict", copied),
        mock.patch.object(test_sharding, "EmbeddingShardingPlanner", return_value=planner),
        uneven_gather() if kernel == "fused" else nullcontext(),
    ):
        test_sharding.sharding_single_rank_test_single_process(
            pg=dist.group.WORLD,
            device=torch.device("cpu"),
            rank=rank,
            world_size=dist.get_world_size(),
            model_class=TestSparseNN,
            embedding_groups={"group_0": [table.feature_names[0] for table in tables]},
            tables=tables,
            weighted_tables=weighted,
            sharders=[sharder],
            optim=EmbOptimType.EXACT_SGD,
            local_size=local_size,
            random_seed=3,
            **of_case,
        )
