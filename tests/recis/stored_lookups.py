"""Engines with rows in a store, on one process or on each of several ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from emulated_groups import emulated_cuda
from lookups import option
from record_dict import RecordDict
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.recis import (
    EmbeddingEngine,
    EmbeddingOption,
    FilterHook,
    RaggedTensor,
    SparseAdam,
    filter_out_sparse_param,
)
from torch_dynemb.storage.tiers import Storage

IDS = 240  # several times what a cache holds
STEPS = 12
SLOTS = 64  # the fewest that a cache may have
GPU_KINDS = ("hbm", "cache", "cache above a disk")
_SEEN_LATELY = FilterHook("GlobalStepFilter", {"filter_step": 7, "filter_interval": 2})


class Trained(NamedTuple):
    """What training gives.

    Attributes:
        outputs: of every step, by feature.
        rows: of all ids, by feature.
        sizes: ids of this process by physical table.
        stats: of the caches after training.
        stored: tables of which the store has records, or directories.
    """

    outputs: list[dict[str, Tensor]]
    rows: list[dict[str, Tensor]]
    sizes: list[dict[str, int]]
    stats: list[Any]
    stored: list[str]


def storage_of(kind: str, path: str) -> Storage | None:
    """Tables' storage: in memory, in a dict of this process, or on a disk."""
    cache = f"{SLOTS} rows"
    if kind in ("memory", "hbm"):
        return None
    if kind == "cache":
        return td.HostStore(cache=cache)
    if kind == "dict":
        return td.ExternalStore(RecordDict(), cache=cache)
    above = cache if kind == "cache above a disk" else None
    return td.SSDStore(
        path, cache=cache, segment="64KiB", disk="64MB", io="threads", device_cache=above
    )


def features(storage: Storage | None) -> dict[str, EmbeddingOption]:
    """Features of three logical tables in two physical ones: all combiners."""
    tile = {"combiner": "tile", "combiner_kwargs": {"tile_len": 3}}
    stored = {"storage": storage}
    return {
        "clicked": option(combiner="mean", **stored),
        "history": option(**tile, **stored),
        "user": option("user", **stored),
        "wide": option("wide", embedding_dim=8, filter_hook=_SEEN_LATELY, **stored),
    }


def batch(seed: int) -> dict[str, Any]:
    """Ragged ids with weights, and dense ones."""
    generator = torch.Generator().manual_seed(seed)

    def ragged(*, weighted: bool, most: int = 6) -> RaggedTensor:
        lengths = torch.randint(0, most, (5,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = torch.randint(0, IDS, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(ids.shape[0], generator=generator) if weighted else None
        return RaggedTensor(ids, offsets, weights)

    return {
        "clicked": ragged(weighted=True),
        "history": ragged(weighted=True),
        "user": torch.randint(0, IDS, (5, 2), generator=generator),
        "wide": ragged(weighted=False, most=9),
    }


def trained(rank: int, kind: str, path: str, prefetching: bool) -> Trained:
    """Trains an engine on batches of this rank.

    Args:
        kind: of storage; see :func:`storage_of`; those of ``GPU_KINDS`` are emulated.
        path: of the files.
        prefetching: rows of the next batch are prefetched.
    """
    with emulated_cuda() if kind in GPU_KINDS else nullcontext():
        return _trained(rank, kind, path, prefetching)


def _trained(rank: int, kind: str, path: str, prefetching: bool) -> Trained:
    torch.manual_seed(5)
    storage = storage_of(kind, path)
    engine = EmbeddingEngine(features(storage))
    tables = filter_out_sparse_param(engine)
    optimizer = SparseAdam(tables, lr=0.1)
    batches = [batch(100 * step + rank) for step in range(STEPS)]
    outputs = []
    following: Any = batches[0]
    for step in range(STEPS):
        output = engine(following)
        following = batches[(step + 1) % STEPS]
        if prefetching:
            following = engine.prefetch(following)
        torch.stack([of.square().sum() for of in output.values()]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append({name: of.detach() for name, of in output.items()})
    stats = [table.group.usage.storage() for table in tables.values()]
    engine.eval()
    with torch.no_grad():
        rows = [
            engine(dict.fromkeys(("clicked", "history", "user", "wide"), ids[:, None]))
            for ids in torch.arange(IDS).split(16)
        ]
    stored = sorted(storage.store.records) if isinstance(storage, td.ExternalStore) else []
    if isinstance(storage, td.SSDStore):
        found = Path(path).rglob("LOCK")
        stored = sorted(str(lock.parent.relative_to(path)) for lock in found)
    return Trained(outputs, rows, [table.sizes() for table in tables.values()], stats, stored)
