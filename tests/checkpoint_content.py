"""Models to be saved, and what a checkpoint should give of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.ops.columns import GENERATION_BITS
from torch_dynemb.parts.table_parts import TablePart


class Content(NamedTuple):
    """A table, by ascending ids.

    Attributes:
        ids, rows, state: as in a :class:`torch_dynemb.RowBatch`.
        scores: int64 [n] by name.
        counts: of ids that wait for admission.
        sketch: int32 [rows, width], or None.
    """

    ids: Tensor
    rows: Tensor
    state: dict[str, Tensor]
    scores: dict[str, Tensor]
    counts: dict[int, int]
    sketch: Tensor | None


def saved_content(path: Path, size: int = 100) -> dict[str, Content]:
    """What the reader gives, of all tables."""
    with td.checkpoint.open(path) as saved:
        return {name: table_content(table, size) for name, table in saved.tables.items()}


def table_content(table: td.checkpoint.CheckpointTable, size: int) -> Content:
    batches = list(table.batches(size))
    assert all(0 < batch.ids.numel() <= size for batch in batches)
    dim = table.embedding_dim
    cpu = torch.device("cpu")
    ids = torch.cat([torch.empty(0, dtype=torch.int64, device=cpu), *(b.ids for b in batches)])
    order = ids.argsort()
    none = torch.empty(0, dim, dtype=table.dtype, device=cpu)
    rows = torch.cat([none, *(batch.rows for batch in batches)])
    scores = {
        word: torch.cat([batch.scores[word] for batch in batches])[order]
        for word in table.scores
        if batches
    }
    state = {
        of.name: torch.cat([batch.state[of.name] for batch in batches])[order]
        for of in table.state_tensors
        if batches
    }
    counts: dict[int, int] = {}
    for counted in table.counts(size):
        counts.update(zip(counted.ids.tolist(), counted.counts.tolist(), strict=True))
    assert len(counts) == table.counted
    return Content(ids[order], rows[order], state, scores, counts, table.sketch())


def group_content(group: td.TableGroup, table: int) -> Content:
    """What a live table has, read of its tensors."""
    config = group.config
    ids = torch.cat([batch.ids for batch in group.export(table)]).sort().values
    found = group.find(ids, torch.tensor([0, ids.numel()]), [table])
    places = found.handles >> GENERATION_BITS
    slab, slabs = config.slab_of(table), len(config.slabs)
    names = [] if config.optimizer is None else [of.name for of in config.optimizer.state]
    state = {
        name: group.rows.state[k * slabs + slab][places].reshape(ids.numel(), -1)
        for k, name in enumerate(names)
    }
    words = [word for word in config.tables[table].policy.scores if word != "none"]
    scores = {word: group.scores.get(table, ids, score=word).scores for word in words}
    return Content(
        ids.cpu(),
        group.rows.weights[slab][places].cpu(),
        {name: values.cpu() for name, values in state.items()},
        {word: values.cpu() for word, values in scores.items()},
        {},
        None,
    )


def agrees(saved: Content, live: Content) -> bool:
    """Whether a saved table has ids, rows, state and scores of a live one; it may have more."""
    scores = {word: saved.scores[word] for word in live.scores}
    return same([*saved[:3], scores], list(live[:4]))


def same(one: Any, other: Any) -> bool:
    """Whether nested values are equal, tensors by every bit and dtype."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def trained_model(steps: int = 3, ids: int = 600) -> nn.ModuleDict:
    """Tables with scores, counts, a sketch, state by row and element, and a dense part."""
    torch.manual_seed(5)
    tables = td.DynamicEmbeddingBagCollection(
        [
            td.TableConfig(
                "users", 12, policy=td.Policy(score=("frequency", "timestamp"), capacity=5000)
            ),
            td.TableConfig(
                "items", 8, dtype=torch.bfloat16, policy=td.Policy(admission=td.AdmitFrequent(2))
            ),
            td.TableConfig("ads", 8, policy=td.Policy(admission=td.AdmitFrequentSketch(2, 1024))),
            td.TableConfig("empty", 8),
        ],
        optimizer=td.Adam(lr=0.1, row_steps=True),
        max_rows=10_000,
    )
    for step in range(steps):
        batch = {n: torch.randint(0, ids, (30, 10)) for n in ("users", "items", "ads")}
        batch["empty"] = torch.empty(30, 0, dtype=torch.int64)
        tables(batch).sum().backward()
        tables.optimizer.step(now=100 + step)
    return nn.ModuleDict({"tables": tables, "top": nn.Linear(3, 2)})


class ColumnShards(nn.Module):
    """A table in column shards, each a module of its own, all with the same ids."""

    def __init__(
        self,
        dims: Sequence[int],
        optimizer: td.OptimizerConfig,
        storage: Sequence[td.ExternalStore | None] | None = None,
    ) -> None:
        super().__init__()
        self.dims = list(dims)
        storages = [None] * len(dims) if storage is None else storage
        self.shards = nn.ModuleList(
            td.DynamicEmbedding(dim, optimizer=optimizer, storage=of)
            for dim, of in zip(dims, storages, strict=True)
        )

    def train_on(self, ids: Tensor) -> None:
        """A step."""
        for k, shard in enumerate(self.shards):
            (shard(ids) * (k + 1)).sum().backward()
            shard.optimizer.step()


def _column_shards(module: ColumnShards, path: str) -> Iterable[TablePart]:
    for k, shard in enumerate(module.shards):
        first = sum(module.dims[:k])
        yield TablePart(path or "shards", shard.group, 0, sum(module.dims), first)  # type: ignore[arg-type]


td.register_module(ColumnShards, tables=_column_shards)


class RowPart(nn.Module):
    """What a rank of several has of tables that are dealt out by ids."""

    def __init__(self, tables: td.DynamicEmbeddingBagCollection, rank: int, ranks: int) -> None:
        super().__init__()
        self.tables = tables
        self.ids = checkpoint.IdSlots(rank, rank + 1, ranks)


def _row_part(module: RowPart, path: str) -> Iterable[TablePart]:
    for table, config in enumerate(module.tables.group.config.tables):
        name, dim = checkpoint.table_name(path, config.name), config.embedding_dim
        yield TablePart(name, module.tables.group, table, dim, 0, module.ids)


td.register_module(RowPart, tables=_row_part)
