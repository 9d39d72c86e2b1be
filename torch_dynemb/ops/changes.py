"""The op that finds which ids of a table have changed, on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.tensors import IndexTensors


class FoundChanges(NamedTuple):
    """Result of :func:`changed_ids_`.

    Attributes:
        ids: int64 [n], in the order of the index.
        handles: int64 [n], of the ids.
    """

    ids: Tensor
    handles: Tensor


@raises_typed_errors
def changed_ids_(
    index: IndexTensors,
    generations: Tensor,
    dirty_bits: Tensor,
    before: Tensor,
    now: Tensor,
    *,
    table: int,
    reader: int,
) -> FoundChanges:
    """The ids of a table that are new, or whose row or scores have changed.

    An owner of a row is an id, the number of its table and 1 (0: nobody), and what is kept of the
    id, where that matters.

    Args:
        index: of the tables, on the CPU; nothing changes.
        generations: int32 [rows], of the slab of the table.
        dirty_bits: uint8 [rows], of the slab: the readers for which a row has changed.
        before: int64 [used rows, 2], or [used rows, 2 + words]: owners of rows when the reader
            looked last.
        now: of the same shape, zeros: gets the owners that rows have now.
        table: its number.
        reader: bits of the reader, 1 to 255.

    Raises:
        RuntimeError: tensors do not fit each other, or an id has a row beyond those of ``now``,
            which has some of the owners then.
    """
    return FoundChanges(
        *torch.ops.dynemb.changed_ids_(
            index.buckets,
            index.scores,
            index.tables,
            index.meta,
            generations,
            dirty_bits,
            before,
            now,
            table,
            reader,
        )
    )


@register_fake("changed_ids_")
def _changed_ids_fake(
    buckets: Tensor,
    scores: Tensor,
    tables: Tensor,
    meta: Tensor,
    generations: Tensor,
    dirty_bits: Tensor,
    before: Tensor,
    now: Tensor,
    table: int,
    reader: int,
) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return tables.new_empty((count,)), tables.new_empty((count,))


__all__ = ["FoundChanges", "changed_ids_"]
