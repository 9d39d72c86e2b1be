"""Lookups in frozen tables on the CPU, which find ids and read their rows in one pass.

A frozen table has no rows but those of its ids, so nobody has to ask whether a row is still that of
an id. The bits are those of ``find`` and a lookup of the handles that it gives, which is what
frozen tables on a GPU do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.ops.lookup import check_weights, lookup_output
from torch_dynemb.ops.serving import Served
from torch_dynemb.ops.tensors import LookupBatch


class FrozenTensors(NamedTuple):
    """The tensors of frozen tables, as ops take them.

    Attributes:
        buckets: int64 [buckets, 8], four keys and four handles each.
        tables: int64 [T, 16], the state of each (``columns.Table``).
        meta: int64 [T, 16], constants (``columns.Meta``).
        weights: float32, float16 or bfloat16 [rows, dim] for each slab; of quantized ones uint8
            [rows, bytes].
        init_data: float64 [numbers], what ids read that are not there.
        formats: a ``columns.RowFormat`` for each slab.
    """

    buckets: Tensor
    tables: Tensor
    meta: Tensor
    weights: list[Tensor]
    init_data: Tensor
    formats: list[int]


@raises_typed_errors
def frozen_lookup(frozen: FrozenTensors, batch: LookupBatch) -> Served:
    """Look rows or bags up in frozen tables; ids and rows are read in one pass.

    Calls ``torch.ops.dynemb.frozen_bag``, or ``frozen_rows`` if ``batch`` asks for rows.

    Args:
        frozen: the tables, on the CPU. Rows that handles of the index name are their ids'.
        batch: what is asked for.

    Returns:
        Sums [B, sum of feature_dims], 0 for an empty bag, or without pooling rows [N, dim], 0 for
        padding ids; and what was missing.

    Raises:
        TypeError, ValueError: dtype, shape or device of per_sample_weights.
        RuntimeError: another argument does not fit the tables, is not on the CPU, or the tables are
            damaged.
    """
    ids, offsets, weights, tables, dims, pooling = batch
    *tensors, formats = frozen
    if pooling == Pooling.NONE:
        output, missing = torch.ops.dynemb.frozen_rows(
            *tensors, ids, offsets, tables, dims[0], formats
        )
    else:
        check_weights("frozen_bag", batch)
        output, missing = torch.ops.dynemb.frozen_bag(
            *tensors, ids, offsets, weights, tables, dims, formats, pooling
        )
    return Served(output, missing)


@register_fake("frozen_bag")
def _frozen_bag_fake(
    buckets: Tensor,
    tables: Tensor,
    meta: Tensor,
    weights: Sequence[Tensor],
    init_data: Tensor,
    ids: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    formats: Sequence[int],
    pooling: int,
) -> tuple[Tensor, Tensor]:
    batch = (offsets.shape[0] - 1) // len(feature_tables)
    return lookup_output(ids, batch, sum(feature_dims)), ids.new_empty((tables.shape[0],))


@register_fake("frozen_rows")
def _frozen_rows_fake(
    buckets: Tensor,
    tables: Tensor,
    meta: Tensor,
    weights: Sequence[Tensor],
    init_data: Tensor,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    dim: int,
    formats: Sequence[int],
) -> tuple[Tensor, Tensor]:
    return lookup_output(ids, ids.shape[0], dim), ids.new_empty((tables.shape[0],))


__all__ = ["FrozenTensors", "frozen_lookup"]
