"""Rows beneath memory, in a dict: what tables do with a store, without a disk and without a cache.

The memory in which the rows would lie is filled with what nobody may read.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import GENERATION_BITS
from torch_dynemb.storage.tiers import Records
from torch_dynemb.table.group_config import GroupConfig
from torch_dynemb.table.records import record_bytes

_WRONG = 12345  # of any dtype; no row of a test has it
_SPOILT = 1000  # rows; more are reserved than there is memory


class DictStore:
    """The rows of some slabs of a group.

    Args:
        config: of the group.
        slabs: whose rows lie here.

    Attributes:
        rows: (slab, row) -> handle, id, table and record.
        most_read: most rows that were read in one call.
        most_written: most rows that were written in one call.
        room: rows that can still be written.
    """

    def __init__(self, config: GroupConfig, slabs: list[int]) -> None:
        self._config, self._slabs = config, slabs
        self.rows: dict[tuple[int, int], tuple[int, int, int, Tensor]] = {}
        self.most_read = self.most_written = 0
        self.room = 1 << 40

    def holds(self, slab: int) -> bool:
        return slab in self._slabs

    def read(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records:
        assert ids.shape == handles.shape
        self.most_read = max(self.most_read, ids.numel())
        size = record_bytes(self._config, slab)
        records = torch.full((ids.numel(), size), 205, dtype=torch.uint8)
        found = torch.zeros(ids.numel(), dtype=torch.bool)
        for k, (id, handle) in enumerate(zip(ids.tolist(), handles.tolist(), strict=True)):
            assert handle >= 0
            known = self.rows.get((slab, handle >> GENERATION_BITS))
            if known is None or known[0] != handle:
                continue
            assert known[1:3] == (id, table)  # else a handle has been given twice
            records[k], found[k] = known[3], True
        return Records(records, found)

    def write(self, slab: int, table: int, ids: Tensor, handles: Tensor, records: Tensor) -> None:
        assert ids.unique().numel() == ids.numel()
        assert records.shape == (ids.numel(), record_bytes(self._config, slab))
        assert records.dtype == torch.uint8
        self.most_written = max(self.most_written, ids.numel())
        if ids.numel() > self.room:
            raise RuntimeError("no room on the disk")
        self.room -= ids.numel()
        for k, (id, handle) in enumerate(zip(ids.tolist(), handles.tolist(), strict=True)):
            assert handle >= 0
            row = handle >> GENERATION_BITS
            self.rows[slab, row] = (handle, id, table, records[k].clone())

    def rows_in_memory(self, slab: int) -> int:
        return 3


def put_in_store(group: td.TableGroup, slabs: list[int] | None = None) -> DictStore:
    """Gives a group without ids a store for the rows of some slabs; default: of all.

    Its rows cannot be looked up or trained, which would take a cache.
    """
    chosen = list(range(len(group.config.slabs))) if slabs is None else slabs
    store = DictStore(group.config, chosen)
    assert sum(group.sizes().values()) == 0
    rows, count = group.rows, len(group.config.slabs)
    for slab in chosen:
        rows.generations[slab][:_SPOILT].fill_(1)  # as if the first owners had written them
        for tensor in (rows.weights[slab], *rows.state[slab::count]):
            tensor[:_SPOILT].fill_(77 if tensor.dtype == torch.uint8 else _WRONG)
    group._tables = dataclasses.replace(group.tables, tiers=store)
    return store
