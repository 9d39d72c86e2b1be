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
        ids: int64 [n], by table; those of a table in the order of their rows.
        handles: int64 [n], of the ids.
        counts: int64 [tables], how many of the ids each table has.
    """

    ids: Tensor
    handles: Tensor
    counts: Tensor


@raises_typed_errors
def changed_ids_(
    index: IndexTensors,
    generations: Tensor,
    dirty_bits: Tensor,
    before: Tensor,
    now: Tensor,
    *,
    slab: int,
    reader: int,
) -> FoundChanges:
    """Find the ids of a slab's tables that are new, or have a changed row or changed scores.

    A record of a row's owner has at least two words. The first is an id. The second has the number
    of its table plus 1 in the upper 36 bits, and the generation of its handle below. It is 0 for a
    row without an owner. The id's scores follow where they matter.

    Args:
        index: of the tables, on the CPU; nothing changes.
        generations: int32 [rows], of the slab.
        dirty_bits: uint8 [rows], of the slab: a bit for each reader that has not seen the row's
            last change.
        before: int64 [used rows, 2], or [used rows, 2 + words]: owners of rows when the reader
            looked last.
        now: of the same shape: receives the present owners.
        slab: its number.
        reader: bits of the reader, 1 to 255.

    Raises:
        RuntimeError: tensors do not fit each other, or an id has a row beyond those of ``now``. In
            the second case ``now`` has some of the owners.
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
            slab,
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
    slab: int,
    reader: int,
) -> tuple[Tensor, Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    ids, handles = tables.new_empty((count,)), tables.new_empty((count,))
    return ids, handles, tables.new_empty(tables.shape[:1])


__all__ = ["FoundChanges", "changed_ids_"]
