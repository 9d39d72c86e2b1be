"""A store of records in memory: the plainest one that :class:`torch_dynemb.ExternalStore` takes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class TableRecords:
    """The records of one table.

    Attributes:
        position: of each id's record.
        records: uint8 [positions, bytes].
    """

    position: dict[int, int] = field(default_factory=dict)
    records: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.uint8))


class RecordDict:
    """Keeps the last record of every id.

    Attributes:
        tables: by name.
        erased: table and ids, as the store was told of them.
        calls: how often records were read or written.
    """

    def __init__(self) -> None:
        self.tables: dict[str, TableRecords] = {}
        self.erased: list[tuple[str, list[int]]] = []
        self.calls = 0
        self._snapshots: dict[str, dict[str, TableRecords]] = {}

    def read(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        self.calls += 1
        there = self.tables.get(table, TableRecords())
        positions = torch.tensor([there.position.get(id, -1) for id in ids.tolist()])
        found = positions >= 0
        if there.position:
            out[found] = there.records[positions[found]]
        return found

    def write(self, table: str, ids: Tensor, records: Tensor) -> None:
        self.calls += 1
        there = self.tables.setdefault(table, TableRecords())
        given = ids.tolist()
        assert len(set(given)) == len(given)
        for id in given:
            there.position.setdefault(id, len(there.position))
        there.records = torch.cat(
            [
                there.records.reshape(-1, records.shape[1]),
                records.new_zeros(len(there.position) - len(there.records), records.shape[1]),
            ]
        )
        there.records[[there.position[id] for id in given]] = records

    def erase(self, table: str, ids: Tensor) -> None:
        self.erased.append((table, ids.tolist()))

    def flush(self) -> None:
        pass

    def snapshot(self, name: str) -> None:
        self._snapshots[name] = copy.deepcopy(self.tables)

    def restore(self, name: str) -> None:
        self.tables = copy.deepcopy(self._snapshots[name])
