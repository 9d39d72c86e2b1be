"""Ids that the tables of a rank have evicted, kept on the host until they are taken."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.host_state import EvictedIds

MOST_RECORDS = 1 << 20  # evictions of one step; a record has 32 bytes


class RecordedIds:
    """Callback of ``group.evicted.call`` that keeps the ids of some tables.

    Args:
        tables: their names in the group.
    """

    def __init__(self, tables: Iterable[str]) -> None:
        self._ids: dict[str, list[Tensor]] = {table: [] for table in tables}

    def __call__(self, table: str, evicted: EvictedIds) -> None:
        if table in self._ids:
            self._ids[table].append(evicted.ids.cpu())

    def __contains__(self, table: str) -> bool:
        return table in self._ids

    def holds(self, table: str) -> bool:
        """Return whether ids of a table were not taken yet."""
        return bool(self._ids.get(table))

    def take(self, table: str) -> Tensor:
        """Take the distinct ids of a table, int64 [n], ascending, on the CPU."""
        kept, self._ids[table] = self._ids[table], []
        ids: Tensor = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *kept]).unique()
        return ids


def record_evicted(group: TableGroup, tables: Iterable[str]) -> None:
    """Record the ids that tables of a group evict from now on.

    A step evicts at most as many ids as the tables have: those of the step are protected.

    Args:
        group: of the tables.
        tables: their names; none: do nothing.
    """
    recorded = list(tables)
    if not recorded:
        return
    capacities = [of.policy.capacity for of in group.config.tables]
    most = sum(MOST_RECORDS if capacity is None else capacity for capacity in capacities)
    group.evicted.call(RecordedIds(recorded), records=min(most, MOST_RECORDS))


__all__ = ["MOST_RECORDS", "RecordedIds", "record_evicted"]
