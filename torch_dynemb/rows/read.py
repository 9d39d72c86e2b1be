"""Rows of a table, batch by batch, without expired ids."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_dynemb.ops.columns import BUCKET_WIDTH
from torch_dynemb.table.content import score_names
from torch_dynemb.table.expiry import Expiry
from torch_dynemb.table.row_access import read_rows
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.tables import Tables, exported


def batches_of(
    tables: Tables,
    table: int,
    size: int,
    *,
    first_column: int = 0,
    state: bool = True,
    scores: bool = True,
    only: Tensor | None = None,
) -> Iterator[RowBatch]:
    """Yield the rows of a table, as copies; in no particular order, each id once.

    Args:
        tables: of the group.
        table: its number.
        size: most ids of a batch.
        first_column: of the whole table that its rows begin with.
        state, scores: whether they are read, too.
        only: int64 [m], ids to read; None: all.
    """
    layout = tables.config.layout
    names = score_names(tables, table) if scores else ()
    expiry = Expiry(tables, table)
    for found in exported(tables, table, max(size, BUCKET_WIDTH)):
        found = expiry.unexpired(found)
        if only is not None:
            found = found.chosen(torch.isin(found.ids, only))
        for begin in range(0, found.ids.numel(), size):
            cut = slice(begin, begin + size)
            ids = found.ids[cut].clone()
            batch = read_rows(tables, table, ids, found.handles[cut], state=state)
            words = {name: found.scores[cut, layout.word(name)].clone() for name in names}
            yield batch._replace(scores=words, first_column=first_column)


__all__ = ["batches_of"]
