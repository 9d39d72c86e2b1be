"""A table that gets the content of another one, as loads of all kinds write it."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.rows.loader import RowLoader, undone_after_error
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.tables import Tables


def write_content(
    tables: Tables,
    table: int,
    content: RowBatch,
    counted: CountedIds | None,
) -> None:
    """Replaces the content of a table, or leaves it as it was.

    Args:
        tables: of the group.
        table: its number.
        content: what it gets; see :func:`torch_dynemb.table.content.read_content`.
        counted: ids that wait for admission.
    """
    loader = RowLoader(tables, {table: content.ids.numel()})
    with undone_after_error([loader]) as done:
        loader.begin()
        loader.write(table, content, 0)
        with defer_signals():
            loader.publish(table, [content.ids], counted)
            loader.end()
            done()


def score_words(content: RowBatch) -> Tensor:
    """The scores of ids side by side, int64 [n, words]."""
    words = [content.ids.new_empty(content.ids.numel(), 0)]
    return torch.cat([*words, *(of[:, None] for of in content.scores.values())], 1)
