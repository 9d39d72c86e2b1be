"""Deduplication: each distinct id is sent once, rows come back, and bags are pooled locally."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import Awaitable, CommOp, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_dynemb import ops
from torch_dynemb.policy.admission import AdmitFrequent, AdmitFrequentSketch
from torch_dynemb.torchrec.planning.options import TableOptions
from torch_dynemb.torchrec.sharding.gloo_exchange import GlooAllToAll
from torch_dynemb.torchrec.sharding.shardings import (
    DynamicRwSequenceSharding,
    DynamicTwSequenceSharding,
)


class FeatureGroups(NamedTuple):
    """Feature groups of a sharding; features of a group look up the same ids.

    Attributes:
        first: the first feature of each group; features of a group are adjacent.
        features: number of features.
        counted: whether a table counts occurrences of ids.
    """

    first: list[int]
    features: int
    counted: bool


class DistinctFeatures(NamedTuple):
    """Distinct ids of a batch, as they are sent.

    Attributes:
        features: distinct ids of a group as those of its first feature, one bag per feature. The
            weights are the counts if a table counts occurrences.
        inverse: int64 [N], position of each id of the batch among the distinct ids.
    """

    features: KeyedJaggedTensor
    inverse: Tensor


def counts_frequency(options: TableOptions) -> bool:
    """Return whether a table counts occurrences of ids, for its score or for its admission."""
    policy = options.policy
    counted = {"frequency", "decayed"} & set(policy.scores)
    return (
        bool(counted)
        or policy.combine == "sum"
        or isinstance(policy.admission, AdmitFrequent | AdmitFrequentSketch)
    )


def feature_groups_of(
    sharding: EmbeddingSharding[Any, Any, Any, Any], options: Mapping[str, TableOptions]
) -> FeatureGroups:
    """Group the features of one table, unless the table treats them differently."""
    first: list[int] = []
    features = 0
    counted = False
    for table in sharding.embedding_tables():
        dynamic = options.get(table.name)
        names = len(table.feature_names)
        together = dynamic is None or not dynamic.feature_policies
        first += [features] if together else range(features, features + names)
        features += names
        counted |= dynamic is not None and counts_frequency(dynamic)
    return FeatureGroups(first, features, counted)


def distinct(features: KeyedJaggedTensor, feature_groups: FeatureGroups) -> DistinctFeatures:
    """Return the distinct ids of a batch, by group of features."""
    first, number, counted = feature_groups
    offsets = features.offsets().to(torch.int64)
    if features.variable_stride_per_key():
        ends = torch.tensor([0, *features.stride_per_key()], device=offsets.device).cumsum(0)
        of_features = offsets[ends]
    else:
        stride = features.stride()
        of_features = offsets[::stride] if stride > 0 else offsets.new_zeros(number + 1)
    bounds = of_features[torch.tensor([*first, number], device=offsets.device)]
    unique = ops.unique_ids(features.values().to(torch.int64).contiguous(), bounds)
    lengths = torch.zeros(number, dtype=torch.int64, device=offsets.device)
    lengths[torch.tensor(first, device=offsets.device)] = unique.offsets.diff()
    counts = None
    if counted:
        counts = unique.counts.to(torch.float32)
    sent = KeyedJaggedTensor(
        keys=features.keys(), values=unique.ids, weights=counts, lengths=lengths, stride=1
    )
    return DistinctFeatures(sent, unique.inverse)


class DedupContext(SequenceShardingContext):  # type: ignore[misc]
    """State of a batch that is needed after its rows have come back.

    Attributes:
        batch: the features before deduplication.
        inverse: position of each of their ids among the sent ids.
    """

    def __init__(
        self,
        *,
        batch: KeyedJaggedTensor | None = None,
        inverse: Tensor | None = None,
        **of_torchrec: Any,
    ) -> None:
        super().__init__(**of_torchrec)  # a dataclass in some versions only
        self.batch = batch
        self.inverse = inverse

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        if self.batch is not None:
            self.batch.record_stream(stream)
        if self.inverse is not None:
            self.inverse.record_stream(stream)


class DedupInputDist(nn.Module):
    """Input dist that sends the distinct ids of a batch.

    Args:
        dist: sends ids.
        feature_groups: of the features.
    """

    def __init__(self, dist: nn.Module, feature_groups: FeatureGroups) -> None:
        super().__init__()
        self._ids_dist = dist
        self._feature_groups = feature_groups
        self._context: DedupContext | None = None

    @property
    def _dist(self) -> nn.Module:
        """The inner all-to-all, which TorchRec's pipelines access to replace its forward."""
        dist = self._ids_dist._dist
        assert isinstance(dist, nn.Module)
        return dist

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        sent, inverse = distinct(features, self._feature_groups)
        awaitable = self._ids_dist(sent)
        unbucketize = getattr(self._ids_dist, "unbucketize_permute_tensor", None)
        if unbucketize is not None:
            # rows come back in the order of ranks
            inverse = unbucketize[inverse]
        self._context = DedupContext(
            batch_size_per_feature_pre_a2a=features.stride_per_key(),
            variable_batch_per_feature=False,  # of the sent features
            features_before_input_dist=sent,
            batch=features,
            inverse=inverse,
        )
        return awaitable

    def take_context(self) -> DedupContext:
        """Take the context of the batch that was sent last."""
        context, self._context = self._context, None
        assert context is not None
        return context


class DedupOutputDist(nn.Module):
    """Output dist that gets rows of distinct ids back and pools the bags of the batch.

    Args:
        dist: sends rows back; it must not reorder features.
        dim: columns of a row.
        weighted: whether sums are weighted; otherwise weights of the batch are ignored.
    """

    def __init__(self, dist: GlooAllToAll, dim: int, *, weighted: bool) -> None:
        super().__init__()
        self._dist = dist
        self._dim = dim
        self._weighted = weighted

    def forward(self, rows: Tensor, context: DedupContext) -> Awaitable[Tensor]:
        awaitable = self._dist(  # flat, in elements
            rows.view(-1, 1),
            lengths=torch.empty(0, dtype=torch.int64, device=rows.device),
            input_splits=[self._dim * ids for ids in context.input_splits],
            output_splits=[self._dim * ids for ids in context.output_splits],
        )
        awaitable.callbacks.append(
            partial(pooled, dim=self._dim, context=context, weighted=self._weighted)
        )
        return awaitable


def pooled(rows: Tensor, dim: int, context: DedupContext, *, weighted: bool) -> Tensor:
    """Sum rows into bags: (B, features * dim), or flat by feature with several batch sizes.

    Means are divided later, as those of bags that are summed over ranks.
    """
    batch, inverse = context.batch, context.inverse
    assert batch is not None
    assert inverse is not None
    rows = rows.view(-1, dim)
    offsets = batch.offsets().to(torch.int64)
    weights = batch.weights_or_none() if weighted else None
    flat = batch.variable_stride_per_key()
    features = 1 if flat else len(batch.keys())  # flat: bag after bag
    if weights is None and rows.dtype == torch.float32:
        sums = ops.pool_rows(rows, inverse, offsets, features=features)
    else:
        bags = F.embedding_bag(
            inverse,
            rows,
            offsets,
            mode="sum",
            per_sample_weights=None if weights is None else weights.to(rows.dtype),
            include_last_offset=True,
        )
        sums = bags.view(features, -1, dim).transpose(0, 1).reshape(-1, features * dim)
    return sums.flatten() if flat else sums


class _Dedup:
    """Base of shardings that pool bags on the rank of their batch."""

    sums = True

    def __init__(self, *arguments: Any, options: Mapping[str, TableOptions], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._feature_groups = feature_groups_of(self, options)
        self.counted = self._feature_groups.counted
        self.by_rank = True

    def create_input_dist(self, device: torch.device | None = None) -> DedupInputDist:
        return DedupInputDist(
            super().create_input_dist(device),  # type: ignore[misc]
            self._feature_groups,
        )

    def create_output_dist(self, device: torch.device | None = None) -> DedupOutputDist:
        tables = self.embedding_tables()  # type: ignore[attr-defined]
        (dim,) = {table.embedding_dim for table in tables}
        codecs = (self.qcomm_codecs_registry or {}).get(  # type: ignore[attr-defined]
            CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name
        )
        process_group = self._pg  # type: ignore[attr-defined]
        weighted = any(table.is_weighted for table in tables)
        return DedupOutputDist(GlooAllToAll(process_group, device, codecs), dim, weighted=weighted)


class DedupRwSharding(_Dedup, DynamicRwSequenceSharding):
    """Deduplicating sharding: the ids of a table are divided over all ranks."""


class DedupTwSharding(_Dedup, DynamicTwSequenceSharding):
    """Deduplicating sharding: each table is on one rank."""


DEDUPED: dict[str, type[EmbeddingSharding[Any, Any, Any, Any]]] = {
    ShardingType.ROW_WISE.value: DedupRwSharding,
    ShardingType.TABLE_WISE.value: DedupTwSharding,
}

__all__ = [
    "DEDUPED",
    "DedupContext",
    "DedupInputDist",
    "counts_frequency",
    "distinct",
    "feature_groups_of",
]
