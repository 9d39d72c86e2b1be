"""What ranks do in tests of GradScaler beside tables that they share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from small_embeddings import embedding
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import oneembedding, ops, recis

KINDS = ("td", "step_with", "recis", "oneembedding")
IDS = torch.arange(20)


def table_of(kind: str) -> tuple[nn.Module, Any]:
    """Return a table of all ranks, and what a GradScaler steps."""
    if kind in ("td", "step_with"):
        group = dist.group.WORLD if dist.is_initialized() else None
        ads = td.DynamicEmbedding(
            4, name="ads", optimizer=td.SGD(lr=0.1), split=True, process_group=group
        )
        if kind == "td":
            return ads, ads.optimizer
        dense = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        td.step_with(dense, ads)
        return ads, dense
    if kind == "recis":
        option = recis.EmbeddingOption(embedding_dim=4, shared_name="ads", block_size=8)
        ads = recis.DynamicEmbedding(option)
        return ads, recis.SparseAdam(recis.filter_out_sparse_param(ads), lr=0.1)
    small = embedding(1)
    return small, oneembedding.Optimizer(torch.optim.SGD(small.parameters(), lr=0.1), [small])


def scaled_steps(rank: int, kind: str) -> dict[str, Any]:
    """Train by scaled losses; return the scale after each step, and rows by id on this rank."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(7)
    module, optimizer = table_of(kind)
    group = module.hashtable.group if kind == "recis" else module.group
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    last = IDS[ops.id_owners(IDS, parts=2) == 1]  # which the second of two ranks has
    scales = []
    infinite = [True, False, False, True, False]
    for step, (ids, overflows) in enumerate(
        zip((IDS, last, IDS, last, IDS), infinite, strict=True)
    ):
        weights = torch.where(ids == last[step], torch.inf if overflows else 1.0, 1.0)
        mine = slice(rank * len(ids) // ranks, (rank + 1) * len(ids) // ranks)
        rows: Tensor = module(ids[mine, None])
        loss = (rows.flatten(1) * weights[mine, None]).sum() * ranks
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    content = {
        int(id): row.tolist()
        for batch in group.export(0)
        for id, row in zip(batch.ids, batch.rows, strict=True)
    }
    return {"scales": scales, "content": content}
