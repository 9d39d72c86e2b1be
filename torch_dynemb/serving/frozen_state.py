"""Checks of a saved state of frozen tables, before a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    GENERATION_BITS,
    GENERATION_MASK,
    INIT_RECORD_COLUMNS,
    MAX_COUNT,
    InitKind,
    Meta,
    Table,
)
from torch_dynemb.ops.tensors import IndexTensors
from torch_dynemb.serving.row_formats import has_columns
from torch_dynemb.table.state_entries import plain_entries

_RECORDS = (
    (Meta.INIT_BEGIN, Meta.INIT_COUNT),
    (Meta.DEFAULT_BEGIN, Meta.DEFAULT_COUNT),
    (Meta.REFUSED_BEGIN, Meta.REFUSED_COUNT),
)


def check_frozen(
    own: Mapping[str, Tensor], given: Mapping[str, Tensor], formats: Sequence[int]
) -> None:
    """Raise ValueError unless ``given`` can replace the buffers of frozen tables.

    Args:
        own: buffers by name, such as ``buckets`` and ``weights0``, for dtypes and shapes.
        given: the same of a saved copy.
        formats: a ``columns.RowFormat`` for each slab.
    """
    entries = plain_entries(own, given, own)
    counts, buckets = entries["tables"][:, Table.BUCKET_COUNT], entries["buckets"].shape[0]
    # each count first, so that the sum cannot wrap
    whole = bool((counts > 0).all()) and bool((counts <= buckets).all())
    if not whole or int(counts.sum()) != buckets:
        raise ValueError(
            f"state entry 'tables' is corrupted: bucket counts are {counts.tolist()}, expected "
            f"{buckets} together"
        )
    regions = torch.stack([counts.cumsum(0) - counts, counts], 1)
    if not torch.equal(entries["meta"][:, [Meta.REGION_BEGIN, Meta.REGION_BUCKETS]], regions):
        raise ValueError("state entry 'meta' is corrupted: its regions are not those of 'tables'")
    for t in range(entries["tables"].shape[0]):
        _check_constants(entries, t, formats)
        _check_table(entries, t)


def _check_constants(entries: Mapping[str, Tensor], t: int, formats: Sequence[int]) -> None:
    """Check the constants that kernels trust: places of rows and initial values."""
    meta = entries["meta"][t].tolist()
    weights = entries.get(f"weights{meta[Meta.SLAB]}")
    if weights is None or not has_columns(weights, formats[meta[Meta.SLAB]], meta[Meta.DIM]):
        raise ValueError(
            f"state entry 'meta' is corrupted: table {t} has dim {meta[Meta.DIM]} and rows of slab "
            f"{meta[Meta.SLAB]}"
        )
    if not 0 <= meta[Meta.FIRST_COLUMN] <= MAX_COUNT or meta[Meta.FIRST_COLUMN] % 4 != 0:
        raise ValueError(
            f"state entry 'meta' is corrupted: table {t} has first column "
            f"{meta[Meta.FIRST_COLUMN]}, expected a multiple of 4"
        )
    data = entries["init_data"].cpu()
    for begin_column, count_column in _RECORDS:
        begin, count = meta[begin_column], meta[count_column]
        damaged = ValueError(
            f"state entry 'init_data' is corrupted: table {t} has no {count} initializers from "
            f"element {begin} on"
        )
        most = data.numel() // INIT_RECORD_COLUMNS
        if not 1 <= count <= most or not 0 <= begin <= data.numel() - count * INIT_RECORD_COLUMNS:
            raise damaged
        described = 0.0  # columns so far; a gap would leave memory uninitialized
        for number in range(count):
            at = begin + number * INIT_RECORD_COLUMNS
            first, end, kind, place = data[at : at + 4].tolist()
            if not (first == described <= end <= meta[Meta.DIM] and kind in set(InitKind)):
                raise damaged
            if kind == InitKind.VECTOR and not 0 <= place <= data.numel() - (end - first):
                raise damaged
            described = end
        if described != meta[Meta.DIM]:
            raise damaged


def _check_table(entries: Mapping[str, Tensor], t: int) -> None:
    row, meta = entries["tables"][t], entries["meta"][t]
    begin, count = int(meta[Meta.REGION_BEGIN]), int(meta[Meta.REGION_BUCKETS])
    buckets = entries["buckets"][begin : begin + count]
    keys, stored = buckets[:, :BUCKET_WIDTH], buckets[:, BUCKET_WIDTH:]
    ids, handles = keys[stored > 0], stored[stored > 0] - 1
    damaged = ValueError(f"state entry 'buckets' is corrupted: the index of table {t} is damaged")
    if bool((stored < 0).any()) or ids.numel() != int(row[Table.SIZE]):
        raise damaged
    offsets = torch.tensor([0, ids.numel()], device="cpu")
    index = IndexTensors.read_only(entries["buckets"], entries["tables"], entries["meta"])
    found = ops.find(index, ids, offsets, [t])
    if not torch.equal(found.handles, handles):
        raise damaged
    generations = entries[f"generations{int(meta[Meta.SLAB])}"]
    rows = handles >> GENERATION_BITS
    if rows.numel() == 0:
        return
    if int(rows.max()) >= generations.shape[0] or rows.unique().numel() != rows.numel():
        raise damaged
    if not torch.equal(generations[rows].to(torch.int64), handles & GENERATION_MASK):
        raise damaged


__all__ = ["check_frozen"]
