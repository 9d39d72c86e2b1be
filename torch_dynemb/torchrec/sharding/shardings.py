"""TorchRec's shardings with dynamic tables: how ids reach the ranks that own them.

Row-wise shardings send id ``i`` to shard ``mix_ids(i) mod parts``. They send the quotient, and the
exchange restores the id from it (:mod:`.agreed_sizes`). TorchRec's bucketize op computes both, over
all 64 bits, for tables of size 0. Other shardings, and row-wise ones with one shard, send ids
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingLookup,
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingInfo,
)
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_dynemb import ops
from torch_dynemb.table.shards import IdSlots
from torch_dynemb.torchrec.planning.plans import PLAN, KernelPlan
from torch_dynemb.torchrec.sharding.agreed_time import TimeOfSharding
from torch_dynemb.torchrec.sharding.batches import with_ids
from torch_dynemb.torchrec.sharding.grid_output import GridOutputDist
from torch_dynemb.torchrec.sharding.lookups import DynamicPooledLookup, DynamicSequenceLookup
from torch_dynemb.torchrec.sharding.reduce_scatter import sum_by_exchange


def _mix(module: nn.Module, arguments: tuple[KeyedJaggedTensor]) -> tuple[KeyedJaggedTensor]:
    (features,) = arguments
    ids = features.values().to(torch.int64).contiguous()
    return (with_ids(features, ops.mix_ids(ids)),)


class _Timed:
    """Base of shardings in which ranks agree on the time, if a table keeps timestamps."""

    _grouped_embedding_configs: list[Any]
    _pg: Any
    _device: torch.device | None
    _env: Any

    def __init__(self, sharding_infos: list[EmbeddingShardingInfo], *more: Any, **named: Any):
        super().__init__(sharding_infos, *more, **named)  # type: ignore[call-arg]
        self.time = TimeOfSharding()
        plans: list[KernelPlan] = [info.fused_params[PLAN] for info in sharding_infos]
        self._keeps_time = any(plan.options.keeps_time for plan in plans)
        self._output_dtype: torch.dtype = sharding_infos[0].fused_params["output_dtype"]

    def _lookup(self, kind: Any, device: torch.device | None, **more: Any) -> BaseEmbeddingLookup:
        """Create the lookup of this rank."""
        lookup = kind(
            self.ids,
            grouped_configs=self._configs_of_rank(),
            pg=self._pg,
            device=device if device is not None else self._device,
            env=self._env,
            **more,
        )
        self.time.take(lookup)
        # what a rank without tables returns, float32 in TorchRec, has to be as what others send
        lookup._dummy_embs_tensor = torch.empty_like(
            lookup._dummy_embs_tensor, dtype=self._output_dtype, requires_grad=True
        )
        return lookup

    def _configs_of_rank(self) -> list[Any]:
        return self._grouped_embedding_configs

    @property
    def ids(self) -> IdSlots:
        """The ids that this rank owns."""
        return IdSlots()

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        input_dist = super().create_input_dist(device)  # type: ignore[misc]
        if self._keeps_time:
            input_dist._dist.register_forward_pre_hook(self.time)
        return input_dist


class _ByRows(_Timed):
    """Base of shardings that send an id to one of several ranks."""

    _get_num_features: Callable[[], int]
    _world_size: int
    _rank: int

    @property
    def ids(self) -> IdSlots:
        return IdSlots(self._rank, self._rank + 1, self._world_size)

    def _get_feature_hash_sizes(self) -> list[int]:
        sizes: list[int] = super()._get_feature_hash_sizes()  # type: ignore[misc]
        return [0 for _ in sizes]

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        input_dist = super().create_input_dist(device)
        if not self.ids.whole:
            input_dist.register_forward_pre_hook(_mix)
        return input_dist


def _make_variable_dist(module: Any, arguments: tuple[Any, ...]) -> None:
    """Have an output dist made again that TorchRec made for one batch size of all features."""
    context = arguments[1] if len(arguments) > 1 else None
    if context is not None and context.variable_batch_per_feature and not module._variable_dist:
        module._dist = None


class _Pooled(_Timed):
    """Base of shardings that send bags."""

    _before_output: ClassVar[Callable[..., Any]] = staticmethod(_make_variable_dist)

    @property
    def sums(self) -> bool:
        """Whether lookups sum the bags of means, which the collection divides."""
        return False

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        output_dist = super().create_output_dist(device)  # type: ignore[misc]
        output_dist.register_forward_pre_hook(self._before_output)
        return output_dist

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup:
        return self._lookup(
            DynamicPooledLookup, device, sums=self.sums, feature_processor=feature_processor
        )


class _SumByRows(_ByRows, _Pooled):
    """Base of row-wise shardings that sum bags over ranks."""

    _before_output = staticmethod(sum_by_exchange)

    @property
    def sums(self) -> bool:
        return not self.ids.whole


class _SumInNode(_SumByRows):
    """Base of shardings that divide the ids of a table over the ranks of one node."""

    _intra_pg: Any
    _grouped_embedding_configs_per_rank: list[list[Any]]

    @property
    def ids(self) -> IdSlots:
        ranks = self._intra_pg.size()
        return IdSlots(self._rank % ranks, self._rank % ranks + 1, ranks)

    def _configs_of_rank(self) -> list[Any]:
        return self._grouped_embedding_configs_per_rank[self._rank]


class _PerId(_Timed):
    """Base of shardings that send rows."""

    counted = False  # whether weights of ids are their numbers of occurrences
    by_rank = False  # whether lookups return rows in the order in which ranks sent their ids

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup:
        return self._lookup(
            DynamicSequenceLookup, device, counted=self.counted, by_rank=self.by_rank
        )


class DynamicTwPooledSharding(_Pooled, TwPooledEmbeddingSharding):  # type: ignore[misc]
    """Pooled sharding: each table is on one rank."""


class DynamicCwPooledSharding(_Pooled, CwPooledEmbeddingSharding):  # type: ignore[misc]
    """Pooled sharding: columns of a table are divided over ranks, each with all ids."""


class DynamicTwCwPooledSharding(_Pooled, TwCwPooledEmbeddingSharding):  # type: ignore[misc]
    """Pooled sharding: columns of a table are divided over the ranks of one node."""


class DynamicRwPooledSharding(_SumByRows, RwPooledEmbeddingSharding):  # type: ignore[misc]
    """Pooled sharding: ids of a table are divided over all ranks."""


class DynamicTwRwPooledSharding(_SumInNode, TwRwPooledEmbeddingSharding):  # type: ignore[misc]
    """Pooled sharding: ids of a table are divided over the ranks of one node."""


class DynamicGridPooledSharding(_SumInNode, GridPooledEmbeddingSharding):  # type: ignore[misc]
    """Pooled sharding: columns are divided over nodes, and ids over the ranks of each node."""

    def create_output_dist(self, device: torch.device | None = None) -> GridOutputDist:
        output_dist = GridOutputDist(
            GridPooledEmbeddingSharding.create_output_dist(self, device),
            dim_sum_per_node=self._dim_sum_per_node(),
            emb_dim_per_node_per_feature=self._emb_dim_per_node_per_feature(),
            qcomm_codecs_registry=self.qcomm_codecs_registry,
        )
        output_dist.register_forward_pre_hook(sum_by_exchange)
        return output_dist

    # column shards of a flat output, which the collection puts together; TorchRec has them from 1.9

    def uncombined_embedding_dims(self) -> list[int]:
        dims: list[int] = self._embedding_dims
        return dims

    def uncombined_embedding_names(self) -> list[str]:
        names: list[str] = self._embedding_names
        return names


class DynamicTwSequenceSharding(_PerId, TwSequenceEmbeddingSharding):  # type: ignore[misc]
    """Sharding per id: each table is on one rank."""


class DynamicCwSequenceSharding(_PerId, CwSequenceEmbeddingSharding):  # type: ignore[misc]
    """Sharding per id: columns of a table are divided over ranks, each with all ids."""


class DynamicRwSequenceSharding(_ByRows, _PerId, RwSequenceEmbeddingSharding):  # type: ignore[misc]
    """Sharding per id: ids of a table are divided over all ranks."""


POOLED: dict[str, type[EmbeddingSharding[Any, Any, Any, Any]]] = {
    ShardingType.TABLE_WISE.value: DynamicTwPooledSharding,
    ShardingType.COLUMN_WISE.value: DynamicCwPooledSharding,
    ShardingType.TABLE_COLUMN_WISE.value: DynamicTwCwPooledSharding,
    ShardingType.ROW_WISE.value: DynamicRwPooledSharding,
    ShardingType.TABLE_ROW_WISE.value: DynamicTwRwPooledSharding,
    ShardingType.GRID_SHARD.value: DynamicGridPooledSharding,
}
SEQUENCE: dict[str, type[EmbeddingSharding[Any, Any, Any, Any]]] = {
    ShardingType.TABLE_WISE.value: DynamicTwSequenceSharding,
    ShardingType.COLUMN_WISE.value: DynamicCwSequenceSharding,
    ShardingType.ROW_WISE.value: DynamicRwSequenceSharding,
}
# sharding types that divide the ids of a table, so bags are summed over ranks
BY_ROWS = {
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
}

__all__ = ["BY_ROWS", "POOLED", "SEQUENCE"]
