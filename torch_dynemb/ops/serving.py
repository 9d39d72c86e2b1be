"""Ops on live tables: lookups that go on while another thread updates the tables, without locks.

A lookup finds its ids and reads their rows in one op, because a handle is good only until the next
update. Of every id it gives the row of one version: that from before or from after an update which
runs meanwhile, and none from before an update that had ended when the lookup began. Rows of one
call may be of several versions.

Any number of threads may look up, one at a time may update; a second one is refused before it has
changed anything. Live tables are on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.ops.functional_copies import refuse_copies
from torch_dynemb.ops.tensors import LookupBatch

# How rows of live tables are stored, and the numbers of Storage in csrc/core/rows/storage.h.
LIVE_FORMATS = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 4, "int4": 5, "fp8": 6}


class LiveTensors(NamedTuple):
    """The tensors of live tables, as ops take them.

    Attributes:
        buckets: int64 [buckets, 8], four keys and four handles each. A table has two ranges of
            buckets, which follow each other: the one in use, and the one for the next rehash.
        tables: int64 [T, 16], the state of each (``columns.LiveTable``).
        meta: int64 [T, 16], constants (``columns.Meta``); REGION_BUCKETS is that of one range.
        rows: int64 [rows, words], one for each slab: id, generation, then values.
        free: int64 [slabs, 4], which rows have no owner (``columns.LiveSlab``).
        init_data: float64 [numbers], what ids read that are not there.
        formats: of the rows of each slab (``LIVE_FORMATS``).
    """

    buckets: Tensor
    tables: Tensor
    meta: Tensor
    rows: list[Tensor]
    free: Tensor
    init_data: Tensor
    formats: list[int]


class Served(NamedTuple):
    """Result of :func:`live_lookup` and :func:`torch_dynemb.ops.frozen_lookup`.

    Attributes:
        output: float32 [B, sum of feature_dims] or [N, dim], sums of rows or the rows.
        missing: int64 [T]; how many ids were not in each table, padding ids aside.
    """

    output: Tensor
    missing: Tensor


class Applied(NamedTuple):
    """Result of :func:`serve_apply_`, ints.

    Attributes:
        inserted, updated, erased: ids; all 0 where the update was refused.
        wanted: rows that new ids want.
        free: rows that there are for them. If that is less, nothing has changed.
    """

    inserted: int
    updated: int
    erased: int
    wanted: int
    free: int


@raises_typed_errors
def live_lookup(live: LiveTensors, batch: LookupBatch) -> Served:
    """Look rows or bags up in live tables; ids and rows are read in one pass.

    Calls ``torch.ops.dynemb.serve_bag``, or ``serve_rows`` if ``batch`` asks for rows.

    Args:
        live: the tables; nothing changes.
        batch: what is asked for.

    Returns:
        Sums [B, sum of feature_dims], 0 for an empty bag, or without pooling rows [N, dim], 0 for
        padding ids; and what was missing.

    Raises:
        RuntimeError: an argument does not fit the tables, is not on the CPU, or the tables are
            damaged.
    """
    ids, offsets, weights, tables, dims, pooling = batch
    tensors = (live.buckets, live.tables, live.meta, live.rows, live.init_data)
    if pooling == Pooling.NONE:
        output, missing = torch.ops.dynemb.serve_rows(
            *tensors, ids, offsets, tables, dims[0], live.formats
        )
    else:
        output, missing = torch.ops.dynemb.serve_bag(
            *tensors, ids, offsets, weights, tables, dims, live.formats, pooling
        )
    return Served(output, missing)


@raises_typed_errors
def serve_apply_(
    live: LiveTensors, table: int, ids: Tensor, values: Tensor, erased: Tensor
) -> Applied:
    """Updates a table: takes ids out, then gives ids their rows. All of it, or nothing.

    Args:
        live: the tables; buckets, tables, rows and free change.
        table: whose ids these are.
        ids: int64 [n]; of an id that is there several times, the last row stays.
        values: float32 [n, dim], their rows.
        erased: int64 [m]; ids that are not there, or are in ``ids``, are passed over.

    Returns:
        What has been done; where ``wanted`` is more than ``free``, nothing.

    Raises:
        RuntimeError: an argument does not fit the tables, is not on the CPU, has a padding id or a
            row that the format cannot hold; or the tables are damaged; or another thread is
            updating tables of this group.
    """
    counts = torch.ops.dynemb.serve_apply_(
        live.buckets,
        live.tables,
        live.rows,
        live.free,
        live.meta,
        table,
        ids,
        values,
        erased,
        live.formats,
    )
    return Applied(*counts.tolist())


@register_fake("serve_bag")
def _serve_bag_fake(
    buckets: Tensor,
    tables: Tensor,
    meta: Tensor,
    rows: Sequence[Tensor],
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
    output = ids.new_empty((batch, sum(feature_dims)), dtype=torch.float32)
    return output, ids.new_empty((tables.shape[0],))


@register_fake("serve_rows")
def _serve_rows_fake(
    buckets: Tensor,
    tables: Tensor,
    meta: Tensor,
    rows: Sequence[Tensor],
    init_data: Tensor,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    dim: int,
    formats: Sequence[int],
) -> tuple[Tensor, Tensor]:
    output = ids.new_empty((ids.shape[0], dim), dtype=torch.float32)
    return output, ids.new_empty((tables.shape[0],))


@register_fake("serve_apply_")
def _serve_apply_fake(
    buckets: Tensor,
    tables: Tensor,
    rows: Sequence[Tensor],
    free: Tensor,
    meta: Tensor,
    table: int,
    ids: Tensor,
    values: Tensor,
    erased: Tensor,
    formats: Sequence[int],
) -> Tensor:
    refuse_copies("serve_apply_", buckets, tables, rows, free)
    return ids.new_empty((5,))


__all__ = [
    "LIVE_FORMATS",
    "Applied",
    "LiveTensors",
    "Served",
    "live_lookup",
    "serve_apply_",
]
