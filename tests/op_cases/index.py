"""Ops on the index of a group: ids, handles, scores, growth."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from group_calls import call_of

from op_cases.groups import MANY_SCORES, POLICIES, Case, OpArguments, make_group, pooled_call
from torch_dynemb.ops.columns import Combine


def index_arguments(
    score: Any, *, insert: bool, empty: bool = False, masked: bool = False
) -> OpArguments:
    group = make_group(score=score)
    call = pooled_call(group, batch=0 if empty else 2)
    index = (
        group.index.buckets,
        group.index.scores,
        group.index.tables,
        group.index.slabs,
        group.index.free_rows,
    )
    if not insert:
        return (*index, group.index.meta, call.ids, call.offsets, call.tables)
    policies = list(call.tables) if group.config.layout.rows else []
    admit = call.ids % 3 != 0 if masked else None
    return (
        *index,
        group.index.sketch,
        group.index.evicted,
        group.index.meta,
        group.index.policy,
        group.index.clock,
        call.ids,
        call.offsets,
        admit,
        call.tables,
        policies,
    )


def find_arguments(*, empty: bool) -> OpArguments:
    group = make_group()
    call = pooled_call(group, batch=0 if empty else 2)
    return (
        group.index.buckets,
        group.index.tables,
        group.index.meta,
        call.ids,
        call.offsets,
        call.tables,
    )


def grow_arguments(score: Any, ids: int) -> OpArguments:
    group = make_group(score=score)
    return group.index.buckets, group.index.scores, group.index.tables, group.index.meta, 0, ids


def shrink_arguments(score: Any, ids: int) -> OpArguments:
    group = make_group(score=score)
    group.insert(0, torch.arange(50))
    group.erase(0, torch.arange(0, 50, 2))
    return group.index.buckets, group.index.scores, group.index.tables, group.index.meta, 0, ids


def handle_arguments() -> OpArguments:
    group = make_group()
    call = call_of(group, [(0, [[4, 5, 70]]), (1, [[0, 3, 4]])])
    handles = torch.arange(6) << 28 | 7
    return (
        group.index.buckets,
        group.index.tables,
        group.index.meta,
        call.ids,
        call.offsets,
        call.tables,
        handles,
    )


def export_arguments(score: Any) -> OpArguments:
    group = make_group(score=score)
    return group.index.buckets, group.index.scores, group.index.tables, group.index.meta, 0, 0, 1000


def changed_arguments(score: Any, *, scores: bool) -> OpArguments:
    group = make_group(score=score)
    slab = group.config.slab_of(1)
    rows = group.index.used_rows(slab)
    words = group.index.scores.shape[1] // 4 if group.index.scores.shape[0] > 0 and scores else 0
    before = torch.zeros(rows, 2 + words, dtype=torch.int64)
    changes = torch.tensor([0, 2, 0, 255] * rows, dtype=torch.uint8)
    index = (group.index.buckets, group.index.scores, group.index.tables, group.index.meta)
    return (*index, group.rows.generations[slab], changes, before, before.clone(), slab, 2)


def counts_arguments() -> OpArguments:
    group = make_group()
    return group.index.buckets, group.index.tables, group.rows.row_clock


def score_arguments(*, given: bool) -> OpArguments:
    group = make_group()
    call = call_of(group, [(0, [[1, 5, 70]]), (1, [[0, 3, 4]])])
    index = (group.index.buckets, group.index.scores, group.index.tables, group.index.meta)
    values = (torch.arange(100, 106),) if given else ()
    return (*index, call.ids, call.offsets, call.tables, *values, 0)


def combine_arguments() -> OpArguments:
    group = make_group()
    call = call_of(group, [(0, [[1, 5, 70]]), (1, [[0, 3, 4]])])
    index = (group.index.buckets, group.index.scores, group.index.tables, group.index.meta)
    weights = torch.arange(100.0, 106.0, dtype=torch.float64).view(torch.int64)
    combines = [int(Combine.LAST), int(Combine.DECAYED_SUM)]
    lists = (call.tables, weights, combines, [0, -7], 0)
    return (*index, group.index.clock, call.ids, call.offsets, *lists)


CASES: dict[str, dict[str, Case]] = {
    "find": {
        "": partial(find_arguments, empty=False),
        "empty": partial(find_arguments, empty=True),
    },
    "find_or_insert_": {
        "scored and masked": partial(index_arguments, POLICIES["sketch"], insert=True, masked=True),
        "step": partial(index_arguments, "step", insert=True),
        "plain": partial(index_arguments, "none", insert=True),
        "empty": partial(index_arguments, "step", insert=True, empty=True),
        **{
            name: partial(index_arguments, policy, insert=True) for name, policy in POLICIES.items()
        },
    },
    "erase_": {
        "scored": partial(index_arguments, "step", insert=False),
        "plain": partial(index_arguments, "none", insert=False),
        "many scores": partial(index_arguments, MANY_SCORES, insert=False),
        "empty": partial(index_arguments, "none", insert=False, empty=True),
    },
    "grow_": {
        "scored": partial(grow_arguments, "step", 60),
        "plain": partial(grow_arguments, "none", 60),
        "many scores": partial(grow_arguments, MANY_SCORES, 60),
        "enough": partial(grow_arguments, "none", 5),
    },
    "shrink_": {
        "scored": partial(shrink_arguments, "step", 0),
        "many scores": partial(shrink_arguments, MANY_SCORES, 5),
        "enough": partial(shrink_arguments, "none", 500),
    },
    "set_handles_": {"": handle_arguments},
    "release_": {"": lambda: (torch.ones(6, 3), 2, 6)},
    "export_batch": {
        "scored": partial(export_arguments, "step"),
        "plain": partial(export_arguments, "none"),
        "many scores": partial(export_arguments, MANY_SCORES),
    },
    "changed_ids_": {
        "scored": partial(changed_arguments, "step", scores=True),
        "scores that do not matter": partial(changed_arguments, "step", scores=False),
        "plain": partial(changed_arguments, "none", scores=True),
        "many scores": partial(changed_arguments, MANY_SCORES, scores=True),
    },
    "reported_counts": {"": counts_arguments},
    "get_scores": {"": partial(score_arguments, given=False)},
    "set_scores_": {"": partial(score_arguments, given=True)},
    "combine_scores_": {"": combine_arguments},
}
