"""A store of rows in a dict: what tables do with one beneath their cache, without a disk."""

from __future__ import annotations

import torch
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import TierHead

LEAST = "64 rows"  # the smallest cache


class RecordDict:
    """Records by table and id.

    Attributes:
        records: table -> id -> record.
        most_read: most rows that were read in one call.
        most_written: most rows that were written in one call.
        room: rows that can still be written.
        reads, writes: records that were read and written.
    """

    def __init__(self) -> None:
        self.records: dict[str, dict[int, Tensor]] = {}
        self.most_read = self.most_written = 0
        self.room = 1 << 40
        self.reads = self.writes = 0

    def read(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        self.most_read = max(self.most_read, ids.numel())
        known = self.records.get(table, {})
        found = torch.zeros(ids.numel(), dtype=torch.bool)
        for k, id in enumerate(ids.tolist()):
            if id in known:
                out[k], found[k] = known[id], True
        self.reads += int(found.sum())
        return found

    def write(self, table: str, ids: Tensor, records: Tensor) -> None:
        assert ids.unique().numel() == ids.numel() == records.shape[0]
        self.most_written = max(self.most_written, ids.numel())
        if ids.numel() > self.room:
            raise RuntimeError("no room on the disk")
        self.room -= ids.numel()
        of_table = self.records.setdefault(table, {})
        of_table.update(zip(ids.tolist(), records.clone(), strict=True))
        self.writes += ids.numel()

    def erase(self, table: str, ids: Tensor) -> None:
        for id in ids.tolist():
            self.records.get(table, {}).pop(id, None)


def stored(store: RecordDict | None = None) -> td.ExternalStore:
    """Storage with a cache that holds few rows."""
    return td.ExternalStore(RecordDict() if store is None else store, cache=LEAST)


def lookups(group: td.TableGroup) -> int:
    """How often rows have been brought into the cache of a group, or could have been."""
    assert group.tables.tiers is not None
    return int(group.tables.tiers.tensors.clock[0, TierHead.EPOCH])
