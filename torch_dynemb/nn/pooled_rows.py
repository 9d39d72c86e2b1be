"""Pooling of rows that come one by one: from other ranks, or for a gradient of their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.nn.features import begins_of_features
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.ops.tensors import LookupBatch


class RowsOfIds(NamedTuple):
    """Rows of the ids of a batch.

    Attributes:
        rows: float32 [n, dim].
        positions: int64 [N], the row of each id.
    """

    rows: Tensor
    positions: Tensor


def pooled_rows(batch: LookupBatch, look_up: Callable[[LookupBatch, Tensor], RowsOfIds]) -> Tensor:
    """Look up and pool a batch; differentiable in the rows, and in the weights of ids.

    Args:
        batch: what is asked for; rows of several dims come one dim after the other.
        look_up: returns rows of a part of the batch with one dim, given where its features begin,
            int64 [features + 1].

    Returns:
        float32 [B, sum of feature_dims], or [N, dim] without pooling.
    """
    outputs: dict[int, Tensor] = {}
    for features, part in _by_dim(batch):
        found = look_up(part, _begins(part))
        if batch.pooling == Pooling.NONE:
            each = torch.arange(part.ids.shape[0] + 1, device=part.ids.device)
            return ops.pool_rows(found.rows, found.positions, each, features=1)
        pooled = ops.pool_rows(
            found.rows,
            found.positions,
            part.offsets,
            features=len(features),
            weights=part.per_sample_weights,
            pooling=Pooling(batch.pooling),
        )
        outputs.update(zip(features, pooled.split(part.feature_dims, 1), strict=True))
    return torch.cat([outputs[feature] for feature in range(len(outputs))], 1)


def _begins(batch: LookupBatch) -> Tensor:
    if batch.offsets.shape[0] == 0:  # rows of one feature
        return torch.tensor([0, batch.ids.shape[0]], device=batch.ids.device)
    return begins_of_features(batch.offsets, len(batch.feature_tables))


def _by_dim(batch: LookupBatch) -> Iterator[tuple[list[int], LookupBatch]]:
    """Divide a batch into lookups of tables of one dim."""
    dims = sorted(set(batch.feature_dims))
    if len(dims) == 1:
        yield list(range(len(batch.feature_dims))), batch
        return
    bags = (batch.offsets.shape[0] - 1) // len(batch.feature_dims)
    ends = _begins(batch).tolist()
    lengths = batch.offsets.diff()
    for dim in dims:
        features = [f for f, feature_dim in enumerate(batch.feature_dims) if feature_dim == dim]
        ids = torch.cat([batch.ids[ends[f] : ends[f + 1]] for f in features])
        weights = batch.per_sample_weights
        if weights is not None:
            weights = torch.cat([weights[ends[f] : ends[f + 1]] for f in features])
        of_bags = torch.cat([lengths[f * bags : (f + 1) * bags] for f in features])
        offsets = torch.cat([of_bags.new_zeros(1), of_bags.cumsum(0)])
        tables = [batch.feature_tables[f] for f in features]
        part = LookupBatch(ids, offsets, weights, tables, [dim] * len(tables), batch.pooling)
        yield features, part


__all__ = ["RowsOfIds", "pooled_rows"]
