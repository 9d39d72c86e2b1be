"""Ops on served tables: frozen ones, which do not change, and live ones.

On the CPU one op finds ids and reads their rows. A GPU serves frozen tables only, by ``find`` and
``embedding_inference``, with the same bits.

Another thread may update live tables during lookups, without locks. A lookup returns each row in
one whole version: from before or after an update that runs meanwhile. It sees every update that
ended before the lookup began. Rows of one call may be of several versions.

Any number of threads may look up. Only one may update at a time; a second one is refused before it
has changed anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.functional_copies import refuse_copies
from torch_dynemb.ops.index import find
from torch_dynemb.ops.lookup import check_weights, lookup_output
from torch_dynemb.ops.tensors import IndexTensors, LookupBatch

# Storage of rows of live tables, by the numbers of Storage in csrc/core/rows/storage.h.
LIVE_FORMATS = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 4, "int4": 5, "fp8": 6}


class ServedTensors(NamedTuple):
    """Tensors of served tables, as ops take them.

    Attributes:
        buckets: int64 [buckets, 8], four keys and four handles each. A live table has two ranges of
            buckets, which follow each other: the one in use, and the one for the next rehash.
        tables: int64 [T, 16], the state of each (``columns.Table``; live: ``columns.LiveTable``).
        meta: int64 [T, 16], constants (``columns.Meta``); REGION_BUCKETS is that of one range.
        weights: float32, float16 or bfloat16 [rows, dim] for each slab; of quantized ones uint8
            [rows, bytes]; live: int64 [rows, words], id, generation, then values.
        generations: int32 [rows] for each slab, read on a GPU only; live: none.
        init_data: float64 [numbers], values of ids that are missing.
        formats: a ``columns.RowFormat`` for each slab; live: of ``LIVE_FORMATS``.
        free: int64 [slabs, 4], rows of live tables without an owner (``columns.LiveSlab``); None:
            the tables are frozen.
    """

    buckets: Tensor
    tables: Tensor
    meta: Tensor
    weights: list[Tensor]
    generations: list[Tensor]
    init_data: Tensor
    formats: Sequence[int]
    free: Tensor | None = None


class Served(NamedTuple):
    """Result of :func:`serve_lookup`.

    Attributes:
        output: float32 [B, sum of feature_dims] or [N, dim], sums of rows or the rows.
        missing: int64 [T]; how many ids were not in each table, padding ids aside.
    """

    output: Tensor
    missing: Tensor


class Applied(NamedTuple):
    """Result of :func:`serve_apply_`, ints.

    Attributes:
        inserted, updated, erased: ids; all 0 if the update was refused.
        wanted: rows that new ids need.
        free: rows available for them. If there are fewer than wanted, nothing has changed.
    """

    inserted: int
    updated: int
    erased: int
    wanted: int
    free: int


def in_host_memory(tensor: Tensor) -> bool:
    """Return whether one op looks ids up; a GPU has one that finds them and one that reads rows."""
    return tensor.device.type == "cpu"


@raises_typed_errors
def serve_lookup(served: ServedTensors, batch: LookupBatch) -> Served:
    """Look rows or bags up in tables that are served; nothing changes.

    Args:
        served: the tables. Rows that handles of a frozen index name are their ids'.
        batch: ids and settings of the lookup.

    Returns:
        Sums [B, sum of feature_dims], 0 for an empty bag, or without pooling rows [N, dim], 0 for
        padding ids; and the number of missing ids.

    Raises:
        TypeError, ValueError: dtype, shape or device of per_sample_weights; on a GPU also of ids or
            offsets.
        RuntimeError: another argument does not fit the tables, live tables are not on the CPU, or
            the tables are damaged.
    """
    if batch.per_sample_weights is not None:
        check_weights("serve_lookup", batch)
    buckets, tables, meta, weights, generations, init_data, formats, free = served
    ids, offsets, per_sample_weights, feature_tables, feature_dims, pooling = batch
    # plain ints: an op takes longer to read a member of an enum
    asked = (offsets, per_sample_weights, feature_tables, feature_dims, int(pooling))
    if free is not None or in_host_memory(buckets):
        output, missing = torch.ops.dynemb.serve_lookup(
            buckets, tables, meta, weights, init_data, ids, *asked, formats, free is not None
        )
    else:
        index = IndexTensors.read_only(buckets, tables, meta)
        handles, missing = find(index, *batch.index_arguments)
        output = torch.ops.dynemb.embedding_inference(
            weights, generations, meta, init_data, ids, handles, *asked, formats
        )
    return Served(output, missing)


@raises_typed_errors
def serve_apply_(
    live: ServedTensors, table: int, ids: Tensor, values: Tensor, erased: Tensor
) -> Applied:
    """Update a table: remove ids, then write rows of ids. All of it is applied, or nothing.

    Args:
        live: the tables; buckets, tables, weights and free change.
        table: number of the table.
        ids: int64 [n]; the last row counts if an id occurs several times.
        values: float32 [n, dim], their rows; or uint8 [n, bytes], rows that are quantized in the
            format of the table (``quantize_rows``).
        erased: int64 [m]; missing ids and those of ``ids`` are skipped.

    Returns:
        Counts of the update; where ``wanted`` exceeds ``free``, it was refused.

    Raises:
        RuntimeError: an argument does not fit the tables, is not on the CPU, or has a padding id or
            a row that the format cannot hold. Or the tables are damaged, or another thread is
            updating tables of this group.
    """
    counts = torch.ops.dynemb.serve_apply_(
        live.buckets,
        live.tables,
        live.weights,
        live.free,
        live.meta,
        table,
        ids,
        values,
        erased,
        live.formats,
    )
    return Applied(*counts.tolist())


@register_fake("serve_lookup")
def _serve_lookup_fake(
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
    pooling: int,
    formats: Sequence[int],
    live: bool,
) -> tuple[Tensor, Tensor]:
    output = lookup_output("serve_lookup", ids, offsets, feature_tables, feature_dims, pooling)
    return output, ids.new_empty((tables.shape[0],))


@register_fake("serve_apply_")
def _serve_apply_fake(
    buckets: Tensor,
    tables: Tensor,
    weights: Sequence[Tensor],
    free: Tensor,
    meta: Tensor,
    table: int,
    ids: Tensor,
    values: Tensor,
    erased: Tensor,
    formats: Sequence[int],
) -> Tensor:
    refuse_copies("serve_apply_", buckets, tables, weights, free)
    return ids.new_empty((5,))


__all__ = ["LIVE_FORMATS", "Applied", "Served", "ServedTensors", "serve_apply_", "serve_lookup"]
