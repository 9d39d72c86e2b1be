"""Steps that change the tables of ``checkpoint_content.trained_model``, and its other content."""

from __future__ import annotations

from pathlib import Path

import torch

import torch_dynemb as td
from torch_dynemb import checkpoint


def dense_files(path: Path) -> list[object]:
    with checkpoint.open(path) as saved:
        saved.verify()
        described = [
            (t.embedding_dim, t.dtype, t.seed, t.optimizer, t.hyper, t.policy, t.step, t.now)
            for t in saved.tables.values()
        ]
        return [saved.kind, saved.parent, saved.dense(), saved.state, described]


def train(tables: td.DynamicEmbeddingBagCollection, step: int) -> None:
    generator = torch.Generator(device="cpu").manual_seed(step)
    device = tables.group.device
    batch = {
        name: torch.randint(
            50 * step, 50 * step + 100, (4, 5), generator=generator, device="cpu"
        ).to(device)
        for name in ("users", "items", "ads")
    }
    batch["empty"] = torch.empty(4, 0, dtype=torch.int64, device=device)
    tables(batch).square().sum().backward()
    tables.optimizer.step(now=200 + step)


def happen(group: td.TableGroup, step: int) -> None:
    """What is not training."""
    device = group.device
    if step % 4 == 1:
        group.erase(0, torch.arange(50 * step, 50 * step + 60, 3, device=device))
        group.insert(3, torch.arange(step, step + 3, device=device))
    if step % 4 == 2:
        group.remove(1, predicate=lambda ids, _: ids % 3 == 0)
        group.compact()
    if step % 4 == 3:
        group.clear(3)
        ids = torch.tensor([7, 1000 + step], device=device)
        group.insert_or_assign(0, ids, torch.full((2, 12), float(step), device=device))
