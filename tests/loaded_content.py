"""A table that gets the content of another one, as loads of all kinds write it."""

from __future__ import annotations

from collections.abc import Sequence

from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.table.content import CountedIds, TableContent
from torch_dynemb.table.load import RowBlock, RowLoader, undone_after_error
from torch_dynemb.table.tables import Tables


def write_content(
    tables: Tables,
    table: int,
    content: TableContent,
    counted: CountedIds | None,
    names: Sequence[str],
) -> None:
    """Replaces the content of a table, or leaves it as it was.

    Args:
        tables: of the group.
        table: its number.
        content: what it gets; see :func:`torch_dynemb.table.content.read_content`.
        counted: ids that wait for admission.
        names: of the columns of ``content.scores``.
    """
    loader = RowLoader(tables, {table: content.ids.numel()})
    with undone_after_error([loader]) as done:
        loader.begin()
        loader.write(table, RowBlock(content.ids, 0, *content[1:]), 0, names)
        with defer_signals():
            loader.publish(table, [content.ids], counted)
            loader.end()
            done()
