"""Workloads for a GPU: our tables and static ones, on batches of the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import torch_dynemb as td
from benchmarks.common.id_streams import ZipfNumbers, spread
from torch_dynemb import ops
from torch_dynemb.ops.columns import Pooling, RowClock
from torch_dynemb.table import lookup

LEARNING_RATE = 0.01
OPTIMIZERS: dict[str, Callable[[], td.optim.OptimizerConfig]] = {
    "SGD": lambda: td.SGD(lr=LEARNING_RATE),
    "RowWiseAdagrad": lambda: td.RowWiseAdagrad(lr=LEARNING_RATE),
    "Adam": lambda: td.Adam(lr=LEARNING_RATE),
}


@dataclass(frozen=True)
class Batch:
    """Ids of one call.

    Attributes:
        numbers: int64 [N], row numbers for static tables.
        ids: int64 [N], the same as ids all over the 64-bit range.
        offsets: int64 [features * bags + 1].
    """

    numbers: Tensor
    ids: Tensor
    offsets: Tensor


def generator_of(device: torch.device, seed: int) -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator(device=device).manual_seed(seed)


def repeated_numbers(limit: int, count: int, unique: int, generator: torch.Generator) -> Tensor:
    """``count`` numbers below ``limit``, exactly ``unique`` of them distinct, in random order."""
    device = generator.device
    chosen = torch.randperm(limit, generator=generator, device=device)[:unique]
    again = torch.randint(unique, (count - unique,), generator=generator, device=device)
    numbers = torch.cat([chosen, chosen[again]])
    return numbers[torch.randperm(count, generator=generator, device=device)].contiguous()


def bag_batch(limit: int, count: int, unique: int, bag: int, generator: torch.Generator) -> Batch:
    """Return a batch of one table, in bags of ``bag`` ids."""
    numbers = repeated_numbers(limit, count, unique, generator)
    offsets = torch.arange(0, count + 1, bag, device=numbers.device)
    return Batch(numbers, spread(numbers), offsets)


def power_law_batch(law: ZipfNumbers, tables: int, count: int, limit: int) -> Batch:
    """Return a batch of several tables, feature after feature, of ``count`` ids each."""
    parts = [law.draw(count) for _ in range(tables)]
    device = parts[0].device
    offsets = torch.arange(tables + 1, device=device) * count
    numbers = torch.cat([part + table * limit for table, part in enumerate(parts)])
    return Batch(numbers, spread(torch.cat(parts)), offsets)


class Ours:
    """Tables of one dim, each looked up by one feature, filled with ids of numbers 0 to rows - 1.

    Args:
        optimizer: a key of OPTIMIZERS.
        tables: number of tables.
        rows: ids of each table.
        dim: columns.
        spare: further ids that there is room for.
        bags: pooled (sum); False: a vector per id.
        device: of the tables.
        storage: of the rows; None: all lie in the memory of the device.
    """

    def __init__(
        self,
        optimizer: str,
        *,
        tables: int,
        rows: int,
        dim: int,
        spare: int,
        bags: bool,
        device: torch.device,
        storage: td.HostStore | None = None,
    ) -> None:
        configs = [td.TableConfig(f"table{t}", dim, storage=storage) for t in range(tables)]
        self.group = td.TableGroup(
            configs,
            optimizer=OPTIMIZERS[optimizer](),
            max_rows=tables * rows + spare,
            seed=1,
            device=device,
        )
        self.dim = dim
        self._bags = bags
        self._tables = list(range(tables))
        self._dims = [dim] * tables
        self._anchor = torch.zeros(1, device=device, requires_grad=True)
        first = tables + RowClock.UPDATES
        # backward ops compare the count of the forward with this: a view of it is always equal
        self._updates = self.group.rows.row_clock[first : first + 1]
        for table in self._tables:
            self.group.reserve(table, rows + spare)  # so that no growth is timed
            for numbers in torch.arange(rows, device=device).split(1 << 20):
                self.group.insert(table, spread(numbers))
        self.group.materialize()

    def find(self, batch: Batch) -> Tensor:
        """Return handles."""
        return self.group.find(batch.ids, batch.offsets, self._tables).handles

    def find_or_insert(self, batch: Batch) -> Tensor:
        """Return handles."""
        return self.group.find_or_insert(batch.ids, batch.offsets, self._tables)

    def read(self, batch: Batch, handles: Tensor) -> Tensor:
        """Return output without autograd."""
        return ops.embedding_inference(self.group.rows, self._asked(batch), handles)

    def lookup(self, batch: Batch) -> Tensor:
        """Return output for inference."""
        return self.read(batch, self.find(batch))

    def forward(self, batch: Batch) -> Tensor:
        """Return output for training."""
        asked = self._asked(batch)
        handles = lookup.stage(self.group.tables, asked, self.find_or_insert(batch))
        code = self.group.config.optimizer_code
        return ops.embedding(self.group.rows, asked, handles, self._anchor, optimizer=code)

    def prefetch(self, batch: Batch) -> None:
        """Start to load the rows of a batch into the cache."""
        self.group.prefetch(batch.ids, batch.offsets, self._tables)

    def _asked(self, batch: Batch) -> ops.LookupBatch:
        pooling = Pooling.SUM if self._bags else Pooling.NONE
        return ops.LookupBatch(batch.ids, batch.offsets, None, self._tables, self._dims, pooling)

    def step(self, batch: Batch, grad: Tensor) -> None:
        """Forward, backward, update."""
        self.forward(batch).backward(grad)

    def backward(self, batch: Batch, handles: Tensor, grad: Tensor) -> None:
        """Run the op of a backward."""
        torch.ops.dynemb.embedding_backward_(
            *self.group.rows.updated,
            grad,
            batch.ids,
            handles,
            batch.offsets,
            None,
            self._updates,
            self._tables,
            self._dims,
            int(Pooling.SUM if self._bags else Pooling.NONE),
            self.group.config.optimizer_code,
        )


class Static:
    """torch's own table: nn.EmbeddingBag or nn.Embedding with sparse gradients."""

    def __init__(self, rows: int, dim: int, *, bags: bool, device: torch.device) -> None:
        self._bags = bags
        self._module: nn.Module
        if bags:
            self._module = nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, device=device)
        else:
            self._module = nn.Embedding(rows, dim, sparse=True, device=device)
        weight = [*self._module.parameters()]
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "SGD": torch.optim.SGD(weight, lr=LEARNING_RATE),
            "Adam": torch.optim.SparseAdam(weight, lr=LEARNING_RATE),
        }

    def forward(self, batch: Batch) -> Tensor:
        """Return output, differentiable."""
        arguments = (batch.numbers, batch.offsets[:-1]) if self._bags else (batch.numbers,)
        output: Tensor = self._module(*arguments)
        return output

    def lookup(self, batch: Batch) -> Tensor:
        """Return output for inference."""
        with torch.no_grad():
            return self.forward(batch)

    def step(self, batch: Batch, grad: Tensor, optimizer: str) -> None:
        """Forward, backward, update."""
        chosen = self.optimizers[optimizer]
        chosen.zero_grad()
        self.forward(batch).backward(grad)
        chosen.step()


def capture(run: Callable[[], object], pool: tuple[int, int] | None = None) -> torch.cuda.CUDAGraph:
    """Capture a function in a CUDA graph, after running it once on a stream of its own.

    Args:
        run: the function.
        pool: memory that graphs share which are replayed one after another.

    Returns:
        The graph.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph


def unique_count(batches: Sequence[Batch]) -> int:
    """Return distinct rows of a batch, on average."""
    counts = [torch.unique(batch.numbers).numel() for batch in batches]
    mean: float = sum(counts) / len(counts)
    return round(mean)
