"""TorchRec's grouped lookups with dynamic kernels in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_dynemb.table.shards import IdSlots
from torch_dynemb.torchrec.sharding.agreed_time import agree_on_time
from torch_dynemb.torchrec.sharding.kernels import DynamicKernel


class DynamicPooledLookup(GroupedPooledEmbeddingsLookup):  # type: ignore[misc]
    """Pooled lookups in all dynamic tables of a sharding on a rank.

    Args:
        ids: the ids that this rank owns.
        sums: sum the bags of means.
        grouped_configs, device, pg, ...: as TorchRec's.
    """

    def __init__(self, ids: IdSlots, *, sums: bool, **arguments: Any) -> None:
        self._ids, self._sums = ids, sums  # before the base class, which makes the kernels
        super().__init__(**arguments)

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        *unused: Any,
        **more: Any,
    ) -> DynamicKernel:
        pooling = PoolingType.SUM if self._sums else config.pooling
        return DynamicKernel(config, device, self._ids, pooling)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        agree_on_time(self, sparse_features)
        kernels = len(self._emb_modules)
        if kernels < 2 or not sparse_features.variable_stride_per_key():
            output: Tensor = super().forward(sparse_features)
            return output
        # TorchRec gives FBGEMM's kernels one buffer for all; these kernels return flat outputs
        of_kernels = sparse_features.split(self._feature_splits)
        outputs = [
            kernel(of_kernel)
            for kernel, of_kernel in zip(self._emb_modules, of_kernels, strict=True)
        ]
        return _by_rank(
            outputs,
            [
                _sizes_per_rank(of_kernel.stride_per_key_per_rank(), grouped.embedding_dims())
                for of_kernel, grouped in zip(of_kernels, self.grouped_configs, strict=True)
            ],
        )

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        """Start to load rows of tiered tables into memory for the next forward."""
        _prefetch(self, sparse_features)

    def register_optim_state_tracker_fn(self, record_fn: Any) -> None:
        """Refuse to track optimizer state.

        Raises:
            NotImplementedError: always.
        """
        names = [table.name for of in self.grouped_configs for table in of.embedding_tables]
        raise NotImplementedError(
            f"register_optim_state_tracker_fn: tables {names} are dynamic, and TorchRec's trackers "
            "find optimizer state by row number: give DeltaTrackerConfig tracking_mode="
            "TrackingMode.ID_ONLY, or make the tables static"
        )


class DynamicSequenceLookup(GroupedEmbeddingsLookup):  # type: ignore[misc]
    """Unpooled lookups in all dynamic tables of a sharding on a rank.

    Args:
        ids: the ids that this rank owns.
        counted: whether weights of ids are their numbers of occurrences.
        by_rank: whether rows are returned in the order in which ranks sent their ids.
        grouped_configs, device, pg, ...: as TorchRec's.
    """

    def __init__(self, ids: IdSlots, *, counted: bool, by_rank: bool, **arguments: Any) -> None:
        self._ids = ids  # before the base class, which makes the kernels
        self._counted = counted
        self._by_rank = by_rank
        super().__init__(**arguments)

    register_optim_state_tracker_fn = DynamicPooledLookup.register_optim_state_tracker_fn

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        *unused: Any,
        **more: Any,
    ) -> DynamicKernel:
        return DynamicKernel(
            config,
            device,
            self._ids,
            PoolingType.NONE,
            counted=self._counted,
            by_rank=self._by_rank,
        )

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        agree_on_time(self, sparse_features)
        if not self._by_rank or len(self._emb_modules) < 2:
            output: Tensor = super().forward(sparse_features)
            return output
        of_kernels = sparse_features.split(self._feature_splits)
        outputs = [
            kernel(of_kernel)
            for kernel, of_kernel in zip(self._emb_modules, of_kernels, strict=True)
        ]
        lengths = [of.lengths().view(len(of.keys()), -1).sum(0).tolist() for of in of_kernels]
        return _by_rank(outputs, lengths)

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        """Start to load rows of tiered tables into memory for the next forward."""
        _prefetch(self, sparse_features)


def _prefetch(
    lookup: GroupedEmbeddingsLookup | GroupedPooledEmbeddingsLookup, features: KeyedJaggedTensor
) -> None:
    if not lookup._emb_modules:
        return  # this rank has no tables
    of_kernels = features.split(lookup._feature_splits)
    for kernel, of_kernel in zip(lookup._emb_modules, of_kernels, strict=True):
        kernel.tables.prefetch(of_kernel)


def _sizes_per_rank(strides: Sequence[Sequence[int]], dims: Sequence[int]) -> list[int]:
    """Return the number of elements for each rank in a flat output with a batch size per
    feature."""
    ranks = len(strides[0])
    return [
        sum(stride[rank] * dim for stride, dim in zip(strides, dims, strict=True))
        for rank in range(ranks)
    ]


def _by_rank(outputs: list[Tensor], sizes: list[list[int]]) -> Tensor:
    """Join the outputs of several kernels: rank after rank, kernel after kernel."""
    pieces = [output.split(size) for output, size in zip(outputs, sizes, strict=True)]
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])


__all__ = ["DynamicPooledLookup", "DynamicSequenceLookup"]
