"""Ops of retrieval: sampled ids, and the best of many scores."""

from __future__ import annotations

from functools import partial

import torch
from seeding import seeded

from op_cases.groups import Case, OpArguments, make_group


def sample_arguments(samples: int, *, kept: int) -> OpArguments:
    """Arguments of a table of 10 ids or fewer; with one left, most samples take a rank."""
    group = make_group()
    group.erase(1, torch.arange(kept, 10))
    index = group.index
    return index.buckets, index.tables, index.meta, 1, torch.tensor([2**40 + 7]), samples


def merge_arguments(k: int, candidates: int) -> OpArguments:
    generator = seeded(5)
    scores = torch.randint(-3, 3, (3, candidates), generator=generator).float()
    scores[:, ::7] = -torch.inf
    ids = torch.randperm(candidates, generator=generator) * 3 - 40
    best = torch.tensor([2.0, 1.0, -torch.inf]).repeat(3, 1)[:, :k].contiguous()
    best_ids = torch.tensor([-50, 1000, -1]).repeat(3, 1)[:, :k].contiguous()
    return scores, ids, best, best_ids


CASES: dict[str, dict[str, Case]] = {
    "sample_ids": {
        "": partial(sample_arguments, 70, kept=10),
        "by rank": partial(sample_arguments, 70, kept=2),
        "none": partial(sample_arguments, 0, kept=10),
    },
    "merge_top_k": {
        "": partial(merge_arguments, 3, 90),
        "one": partial(merge_arguments, 1, 33),
        "no candidates": partial(merge_arguments, 2, 0),
    },
}
