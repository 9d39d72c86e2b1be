"""What tables were like before a load: a failure puts it back."""

from __future__ import annotations

from collections.abc import Iterable

from torch_dynemb.ops.columns import Meta, Slab, Table
from torch_dynemb.table.state import recount
from torch_dynemb.table.tables import Tables


class Before:
    """Counts and clocks of a group some of whose tables have no ids.

    Args:
        tables: of the group.
        numbers: of the tables without ids, which are to be loaded.
    """

    def __init__(self, tables: Tables, numbers: Iterable[int]) -> None:
        counters = tables.config.layout.counters
        own = list(numbers)
        self._tables = tables
        self._numbers = [*own, *(of for of in (counters[n] for n in own) if of is not None)]
        index, rows = tables.index, tables.rows
        kept = [index.tables, index.slabs, index.clock, index.sketch, index.evicted]
        kept += [index.meta[:, Meta.SEED], rows.row_clock]
        if tables.host.proposed_now is not None:
            kept.append(tables.host.proposed_now)
        self._kept = [(tensor, tensor.clone()) for tensor in kept]
        self._next_rows = index.slabs[:, Slab.NEXT_ROW].tolist()

    def put_back(self) -> None:
        """Takes ids away that have come since then, and their rows."""
        tables = self._tables
        index = tables.index
        for number in self._numbers:
            active = index.active_buckets(number)
            index.buckets[active] = 0
            if number < len(tables.config.tables) and tables.config.layout.score_words:
                index.scores[active] = 0
        for s, next_row in enumerate(self._next_rows):
            if tables.stored(s) is None:
                tables.rows.generations[s][next_row : index.used_rows(s)] = 0
        for tensor, values in self._kept:
            tensor.copy_(values)
        index.tables[self._numbers, Table.TOMBSTONES] = 0  # of ids that were there before a load
        tables.bind_memory()
        recount(tables)


__all__ = ["Before"]
