"""Lines of a stream with several tables, and what a sample of it says."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from common.id_streams import ZipfNumbers, spread
from torch import Tensor

from torch_dynemb.plan.counting import IdCounter
from torch_dynemb.plan.ranks.demand import ColumnDemand, column_demand


@dataclass
class Stream:
    """Zipf ids of tables, with bags of 0 to twice ``bag`` ids.

    Attributes:
        tables: number of tables; the bags of every other one have a single id.
        rows: ids of each.
        bag: mean size of bags, at least 1.
    """

    tables: int
    rows: int
    bag: int
    _numbers: list[ZipfNumbers] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._numbers = [ZipfNumbers(self.rows, seed=table) for table in range(self.tables)]

    def lines(self, count: int, seed: int) -> tuple[list[Tensor], Tensor]:
        """Draw lines.

        Returns:
            ids: int64 of each table.
            lengths: int32 [tables, count].
        """
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.ones(self.tables, count, dtype=torch.int32)
        several = lengths[::2]
        several.copy_(torch.randint(2 * self.bag + 1, several.shape, generator=generator))
        ids = []
        for table, numbers in enumerate(self._numbers):
            numbers.restart(seed * self.tables + table)
            ids.append(spread(numbers.draw(int(lengths[table].sum()))))
        return ids, lengths

    def sample(self, lines: int) -> list[ColumnDemand]:
        """Return what a sample says of each table; no step has its lines."""
        ids, lengths = self.lines(lines, seed=1 << 20)
        demands = []
        for of_table, lengths_of_table in zip(ids, lengths, strict=True):
            counter = IdCounter()
            on_lines = torch.arange(lines).repeat_interleave(lengths_of_table)
            counter.add(of_table, on_lines, lines=lines)
            counts = counter.counts()
            demands.append(column_demand(counts, counts.distinct))
        return demands
