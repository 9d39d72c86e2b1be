"""Slabs with tables that are to be stored in different formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.ops.columns import BUCKET_WIDTH, GENERATION_BITS, GENERATION_MASK, Meta, Table
from torch_dynemb.serving.row_formats import RowKind


class SplitRows(NamedTuple):
    """Slabs with tables that are to be stored in one format.

    Attributes:
        buffers: of the frozen tables; those that a split changes are new.
        kinds: format of each slab.
    """

    buffers: dict[str, Tensor]
    kinds: list[RowKind | None]


def split_by_kind(buffers: Mapping[str, Tensor], kinds: Sequence[RowKind | None]) -> SplitRows:
    """Divide slabs until all tables of each are to be stored in one format.

    Slabs with one format stay as they are, row for row. Of the others, each format gets the rows of
    its tables, in their order, and no rows without an owner.

    Args:
        buffers: of :class:`torch_dynemb.serving.FrozenTables`, which do not change.
        kinds: format of each table.

    Returns:
        See :class:`SplitRows`.
    """
    made = dict(buffers)
    slab_of = buffers["meta"][:, Meta.SLAB].tolist()
    slabs = max(slab_of) + 1
    of_slabs: list[RowKind | None] = []
    more: list[RowKind | None] = []
    for slab in range(slabs):
        tables = [t for t, of in enumerate(slab_of) if of == slab]
        wanted = list(dict.fromkeys(kinds[t] for t in tables))
        of_slabs.append(wanted[0])
        if len(wanted) == 1:
            continue
        if made["buckets"] is buffers["buckets"]:
            made |= {name: buffers[name].clone() for name in ("buckets", "meta")}
        for kind in wanted:
            number = slab if kind == wanted[0] else slabs + len(more)
            if kind != wanted[0]:
                more.append(kind)
            _move(made, buffers, [t for t in tables if kinds[t] == kind], slab, number)
    return SplitRows(made, of_slabs + more)


def _move(
    made: dict[str, Tensor],
    buffers: Mapping[str, Tensor],
    tables: list[int],
    slab: int,
    number: int,
) -> None:
    """Move the rows of some tables of a slab into a new slab.

    Args:
        made: the buffers to change; ``buckets`` and ``meta`` in place.
        buffers: as they were.
        tables: numbers of the tables to move.
        slab: their slab.
        number: of the new slab.
    """
    chosen = []
    rows = 0
    for table in tables:
        begin = int(buffers["meta"][table, Meta.REGION_BEGIN])
        count = int(buffers["tables"][table, Table.BUCKET_COUNT])
        handles = made["buckets"][begin : begin + count, BUCKET_WIDTH:]
        stored = handles[handles > 0] - 1
        numbers, places = (stored >> GENERATION_BITS).sort()
        moved = torch.empty_like(stored)
        moved[places] = torch.arange(rows, rows + len(stored), device=stored.device)
        handles[handles > 0] = ((moved << GENERATION_BITS) | (stored & GENERATION_MASK)) + 1
        made["meta"][table, Meta.SLAB] = number
        chosen.append(numbers)
        rows += len(stored)
    numbers = torch.cat(chosen)
    if rows == 0:  # at least one row, so that an empty table has a shape that kernels accept
        numbers = numbers.new_zeros(1)
    for name in ("weights", "generations"):
        made[f"{name}{number}"] = buffers[f"{name}{slab}"][numbers]


__all__ = ["SplitRows", "split_by_kind"]
