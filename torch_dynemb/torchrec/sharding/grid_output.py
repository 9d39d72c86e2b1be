"""Output dist of a grid: sums over the ranks of a node, then columns from all nodes."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.distributed.dist_data import PooledEmbeddingsAllToAll
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingDist


class GridOutputDist(TwRwPooledEmbeddingDist):  # type: ignore[misc]
    """Output dist of ``grid_shard``, also for a batch size per feature.

    A grid sends what ``table_row_wise`` sends, and then puts the columns of a table together. For a
    batch size per feature, the collection does so. TorchRec's own grid takes such batches from 1.9.

    Args:
        of_grid: TorchRec's output dist of the same sharding.
        dim_sum_per_node: columns of all features of each node.
        emb_dim_per_node_per_feature: columns of each feature of each node.
        qcomm_codecs_registry: codecs of quantized communication.
    """

    def __init__(
        self,
        of_grid: Any,
        *,
        dim_sum_per_node: list[int],
        emb_dim_per_node_per_feature: list[list[int]],
        qcomm_codecs_registry: dict[str, Any] | None,
    ) -> None:
        super().__init__(
            rank=of_grid._rank,
            cross_pg=of_grid._cross_pg,
            intra_pg=of_grid._intra_pg,
            dim_sum_per_node=dim_sum_per_node,
            emb_dim_per_node_per_feature=emb_dim_per_node_per_feature,
            device=of_grid._device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )
        self._of_columns = of_grid._callbacks

    def _create_output_dist_modules(
        self, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> None:
        super()._create_output_dist_modules(sharding_ctx)
        self._cross_dist: nn.Module = PooledEmbeddingsAllToAll(
            pg=self._cross_pg,
            dim_sum_per_rank=self._dim_sum_per_node,
            device=self._device,
            codecs=self._cross_codecs,
            callbacks=self._of_columns,
        )


__all__ = ["GridOutputDist"]
