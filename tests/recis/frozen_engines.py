"""Frozen copies of engines with rows on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rank_steps import SEED, batch, features, insert_content, option
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.recis import (
    DynamicEmbedding,
    EmbeddingEngine,
    FilterHook,
    SparseAdam,
    filter_out_sparse_param,
)


def trained_engine(rank: int, size: int) -> EmbeddingEngine:
    """An engine of features of all kinds, after two steps."""
    torch.manual_seed(SEED)
    engine = EmbeddingEngine(features())
    insert_content(engine, rank, size)
    optimizer = SparseAdam(filter_out_sparse_param(engine), lr=0.1)
    for step in range(2):
        output = engine(batch(range(3 * rank, 3 * rank + 5), step))
        torch.stack([of.float().square().sum() for of in output.values()]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine.eval()


def sizes_of(engine: Any) -> dict[str, int]:
    """Ids by logical table."""
    return {name: n for table in engine.tables.values() for name, n in table.sizes().items()}


def frozen_engine(
    rank: int, ranks: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None, dict[str, int], dict[str, int]]:
    """Outputs of an engine and of its copy, and ids by logical table of both."""
    engine = trained_engine(rank, 2)
    copy = td.freeze(engine, ranks=ranks)
    data = batch(range(40), 7)
    live = {name: of.detach() for name, of in engine(data).items()}
    if copy is None:
        return live, None, sizes_of(engine), {}
    return live, copy(data), sizes_of(engine), sizes_of(copy)


def kept_ids(rank: int, path: Path) -> tuple[list[int], list[int]]:
    """Ids of a copy, and those on this rank of an embedding that follows a delta log."""

    def embedding() -> DynamicEmbedding:
        return DynamicEmbedding(option(filter_hook=FilterHook("KeepsTime")))

    module = embedding()
    optimizer = SparseAdam(filter_out_sparse_param(module), lr=0.1)
    for step in range(3):
        module(torch.arange(4)[:, None] + 4 * step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    keep = td.Top(5, by="step")
    copy = td.freeze(module, keep=keep)
    log = td.delta_log.DeltaLog(path, keep=keep)
    log.attach(module)
    log.publish()
    log.close()
    other = embedding()
    SparseAdam(filter_out_sparse_param(other), lr=0.1)
    td.checkpoint.load(path / "base", other)
    td.delta_log.follow(path, other).update()
    (tables,) = (of for of in copy.modules() if isinstance(of, td.serving.FrozenTables))
    return sorted(tables.ids(0).tolist()), sorted(other.hashtable.ids().tolist())
