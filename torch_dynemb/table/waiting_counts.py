"""Counts of ids that wait for admission, written from outside."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import PolicyColumn, Table
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.tables import Tables, one_table

_LOOKUPS = [Table.FOUND, Table.MISSED, Table.REJECTED, Table.NOT_ADMITTED, Table.DEFAULT_SERVED]


def write_counts(tables: Tables, table: int, counted: CountedIds) -> None:
    """Set counts of ids without a row, also of ids without room.

    Args:
        tables: of the group.
        table: its number; it counts ids that wait for admission.
        counted: ids without a row, with counts above 0.
    """
    counters = tables.config.layout.counters[table]
    assert counters is not None
    policy = tables.index.policy.clone()
    policy[table, PolicyColumn.THRESHOLD] = 1 << 62  # beyond any count
    flat, offsets, features = one_table(tables, table, counted.ids.to(tables.device))
    before = tables.index.tables[table, _LOOKUPS]
    index = tables.index._replace(policy=policy)
    ops.find_or_insert_(index, flat, offsets, None, features, features)
    tables.index.tables[table, _LOOKUPS] = before  # nothing has been looked up
    # stored like handles, where 0 means an empty slot
    counts = counted.counts.to(tables.device) - 1
    ops.set_handles_(tables.index, flat, offsets, [counters], counts)


def counts_among(counted: CountedIds, ids: Tensor) -> Tensor:
    """Return the counts of ids, int64 [n]; 0 for an id that is not counted.

    Args:
        counted: ids ascending, with their counts.
        ids: int64 [n].
    """
    if counted.ids.numel() == 0:
        return torch.zeros_like(ids)
    places = torch.searchsorted(counted.ids, ids).clamp(max=counted.ids.numel() - 1)
    return torch.where(counted.ids[places] == ids, counted.counts[places], 0)


class CountUpdate:
    """Update of some counts of a table; :meth:`undo` restores them.

    Args:
        tables: of the group.
        table: its number; it counts ids that wait for admission.
        before: ids without a row, with their present counts; 0: not counted.
        counts: int64 [n], their new counts; 0: remove the count.
    """

    def __init__(self, tables: Tables, table: int, before: CountedIds, counts: Tensor) -> None:
        self._tables, self._table = tables, table
        self._before, self._after = before, CountedIds(before.ids, counts)

    def apply(self) -> None:
        """Set the new counts.

        Raises:
            RuntimeError: memory is short.
        """
        self._set(self._after)

    def undo(self) -> None:
        """Restore the counts from before :meth:`apply`, wherever that failed."""
        self._set(self._before)

    def _set(self, counted: CountedIds) -> None:
        tables = self._tables
        counters = tables.config.layout.counters[self._table]
        assert counters is not None
        none = counted.ids[counted.counts == 0]
        if none.numel() > 0:
            flat, offsets, _ = one_table(tables, self._table, none)
            ops.erase_(tables.index, flat, offsets, [counters])
        some = counted.counts > 0
        if bool(some.any()):
            write_counts(tables, self._table, CountedIds(counted.ids[some], counted.counts[some]))


__all__ = ["CountUpdate", "counts_among", "write_counts"]
