"""Frozen copies of engines with rows on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rank_steps import SEED, batch, features, insert_content
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.checkpoint.parts import parts_of
from torch_dynemb.recis import EmbeddingEngine, SparseAdam, filter_out_sparse_param


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


def kept_engine(rank: int, path: Path) -> tuple[dict[str, int], ...]:
    """Ids by logical table: of an engine, of a copy, and of an engine that follows a delta log."""
    engine = trained_engine(rank, 2)
    # ids of the second step, in the tables that keep scores, for a filter
    scored = [part for part in parts_of(engine) if part.group.config.layout.score_words]
    keep = {part.name: td.AtLeast(1, by="step") for part in scored}
    assert len(keep) > 0
    copy = td.freeze(engine, keep=keep)
    log = td.checkpoint.DeltaLog(path, keep=keep)
    log.attach(engine)
    log.publish()
    log.close()
    other = trained_engine(rank, 2)
    td.checkpoint.replay(path, other)
    return sizes_of(engine), sizes_of(copy), sizes_of(other)
