"""The index of one dynamic table, as the benchmarks call it: rows are handed out, never touched."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb import Policy, TableConfig, TableGroup
from torch_dynemb.ops.columns import Table

_FEATURE_TABLES = [0]


class DynamicIndex:
    """Index of a group of one table.

    Args:
        scores: keep a score an id, set by every training lookup.
    """

    def __init__(self, *, scores: bool = False) -> None:
        self._group = TableGroup(
            [TableConfig("bench", 1, policy=Policy(score="step" if scores else "none"))],
            optimizer=None,
        )
        self._offsets: dict[int, Tensor] = {}

    def _offsets_of(self, ids: Tensor) -> Tensor:
        count = len(ids)
        if count not in self._offsets:
            self._offsets[count] = torch.tensor([0, count])
        return self._offsets[count]

    def __len__(self) -> int:
        return self._group.size(0)

    @property
    def used_bytes(self) -> int:
        """Bytes of the index in use."""
        return self._group.usage.memory()["index"]

    @property
    def growths(self) -> int:
        """How often the index has grown."""
        return int(self._group.index.tables[0, Table.GROWTHS])

    def reserve(self, ids: int) -> None:
        """Grow once, so that ``ids`` ids fit."""
        self._group.reserve(0, ids)

    def find(self, ids: Tensor) -> Tensor:
        """Return handles of ids, -1 for missing ones; changes nothing."""
        return self._group.find(ids, self._offsets_of(ids), _FEATURE_TABLES).handles

    def find_or_insert(self, ids: Tensor) -> Tensor:
        """Return handles of ids; new ids get a row, and scores of all are updated."""
        return self._group.find_or_insert(ids, self._offsets_of(ids), _FEATURE_TABLES)

    def step(self) -> None:
        """Advance the clock, as ``optimizer.step()`` does."""
        self._group.index.clock[0] += 1
