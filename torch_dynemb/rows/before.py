"""The content of tables before a load, to restore after a failure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch_dynemb.ops.columns import Meta, Table
from torch_dynemb.table.row_access import DIRTY, state_tensors
from torch_dynemb.table.state import used_tensors
from torch_dynemb.table.tables import Tables


class Before:
    """Content of a group before some of its tables are loaded.

    Args:
        tables: of the group.
        numbers: of the index tables to load, counter tables included.
        copied: True: copy all ids and rows to host memory. False: the tables to load have no ids,
            and rows of other tables stay in place.
    """

    def __init__(self, tables: Tables, numbers: Iterable[int], *, copied: bool) -> None:
        index, rows = tables.index, tables.rows
        self._tables, self._copied = tables, copied
        self._numbers = list(range(index.tables.shape[0]) if copied else numbers)
        kept = [index.tables, index.slabs, index.clock, index.sketch, index.evicted]
        kept += [index.meta[:, Meta.SEED], rows.row_clock, *rows.pending[-1:]]
        if tables.host.proposed_now is not None:
            kept.append(tables.host.proposed_now)
        self._kept = [(tensor, tensor.clone()) for tensor in kept]
        marks = [
            of[: index.used_rows(slab)]
            for slab, of in enumerate(tables.rows.dirty_bits)
            if tables.stored(slab) is None
        ]
        content = [*(tensor for _, tensor in used_tensors(tables)), *marks] if copied else []
        self._content = [(tensor, tensor.to("cpu", copy=True)) for tensor in content]
        readers = tables.host.readers.values()
        self._readers = [(reader, reader.since, reader.owners) for reader in readers]
        self._told = tables.host.steps, list(tables.host.rejected)

    def put_back(self, ends: Sequence[int] = ()) -> None:
        """Remove ids and rows that were added since, and restore those that were removed.

        Memory that the tables have taken since then is released.

        Args:
            ends: by slab, the end of rows that were written without an id.
        """
        tables = self._tables
        index, slabs = tables.index, len(tables.config.slabs)
        for number in self._numbers:
            active = index.active_buckets(number)
            index.buckets[active] = 0
            if number < len(tables.config.tables) and tables.config.layout.score_words:
                index.scores[active] = 0
        used = [max([index.used_rows(slab), *ends[slab : slab + 1]]) for slab in range(slabs)]
        for tensor, values in self._kept:
            tensor.copy_(values)
        for slab in range(slabs):
            unowned = slice(index.used_rows(slab), used[slab])
            if tables.stored(slab) is None and unowned.start < unowned.stop:
                # state of rows of generation 0 is taken for zero, and a GPU keeps what it was
                for tensor in state_tensors(tables, slab).values():
                    tensor[unowned] = 0
                tables.rows.generations[slab][unowned] = 0
        tables.bind_memory()
        for tensor, values in self._content:
            tensor.copy_(values)
        if not self._copied:
            # tombstones of ids before the load
            index.tables[self._numbers, Table.TOMBSTONES] = 0
        for slab in range(len(tables.rows.dirty_bits)):
            stored = tables.stored(slab)
            if stored is not None:  # rows moved meanwhile: all of them may have changed
                stored.set_dirty_bits(slab, index.used_rows(slab), kept=DIRTY, added=DIRTY)
        for reader, since, owners in self._readers:
            reader.since, reader.owners = since, owners
        tables.host.steps, tables.host.rejected = self._told[0], list(self._told[1])
        tables.release_memory()


__all__ = ["Before"]
