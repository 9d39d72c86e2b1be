"""What the tables of a model hold, whichever module they are in and whatever rank has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torch_dynemb.parts.table_parts import parts_of
from torch_dynemb.table.row_access import read_rows
from torch_dynemb.table.tables import exported

Content = dict[tuple[str, int], Any]  # by table and id


def content(model: nn.Module, *, state: bool = True) -> Content:
    """Bits of the row by first column, and those of the optimizer state.

    Args:
        model: with tables on this rank.
        state: the optimizer state, too.
    """
    result: Content = {}
    for part in parts_of(model):
        tables = part.group.tables
        for batch in exported(tables, part.table, 1 << 20):
            values = read_rows(tables, part.table, batch.ids, batch.handles)
            # 8 bits in four of float32 may be no number, which would not equal itself
            words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.rows.dtype.itemsize]
            rows = values.rows.view(words).tolist()
            states = [of.reshape(len(rows), -1).tolist() for of in values.state.values()]
            for number, id in enumerate(batch.ids.tolist()):
                entry = result.setdefault((part.name, id), {})
                entry[part.first_column] = rows[number]
                if state:
                    entry[-1 - part.first_column] = [of[number] for of in states]
    return result


def merged(of_ranks: Iterable[Content]) -> Content:
    """What ranks have together, of rows without state: whole rows."""
    columns: dict[tuple[str, int], dict[int, list[Any]]] = {}
    for of_rank in of_ranks:
        for key, entry in of_rank.items():
            known = columns.setdefault(key, {})
            assert known.keys().isdisjoint(entry), key
            known.update(entry)
    return {
        key: [value for _, values in sorted(of.items()) for value in values]
        for key, of in columns.items()
    }
