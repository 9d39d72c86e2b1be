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
    """Find the ids of a table that are new, or have a changed row or changed scores.

    A record of a row's owner is an id, the number of its table plus 1 (0: no owner), and the id's
    scores where they matter.

    Args:
        index: of the tables, on the CPU; nothing changes.
        generations: int32 [rows], of the slab of the table.
        dirty_bits: uint8 [rows], of the slab: a bit for each reader that has not seen the row's
            last change.
        before: int64 [used rows, 2], or [used rows, 2 + words]: owners of rows when the reader
            looked last.
        now: of the same shape, zeros: receives the present owners.
        table: its number.
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
