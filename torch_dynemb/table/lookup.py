"""Handles of the ids of a batch: the index part of training lookups."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import integer
from torch_dynemb.errors import ForkedProcessError
from torch_dynemb.ops.columns import NO_HANDLE, Clock
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.policy.admission import AdmitBy, NewIds, admission_hook
from torch_dynemb.table.custom_scores import (
    add_custom_scores,
    by_feature,
    check_custom_scores,
    scores_of_occurrences,
)
from torch_dynemb.table.evictions import keep_evicted_rows
from torch_dynemb.table.expiry import below_floors
from torch_dynemb.table.tables import Tables


def find(
    tables: Tables, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int]
) -> ops.FoundIds:
    """Find handles as :func:`torch_dynemb.ops.find` does."""
    return ops.find(tables.index, ids, offsets, feature_tables)


def find_or_insert(
    tables: Tables,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    feature_policies: Sequence[int] | None = None,
    *,
    scores: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Find or insert ids as :meth:`torch_dynemb.TableGroup.find_or_insert` does."""
    if counts is not None:
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        each, bounds = ids.repeat_interleave(counts), ends[offsets]
        if scores is not None:
            scores = scores_of_occurrences(
                tables, each, bounds, feature_tables, scores.repeat_interleave(counts), ends[:-1]
            )
        handles = find_or_insert(
            tables, each, bounds, feature_tables, feature_policies, scores=scores
        )
        return handles[ends[:-1]]
    if tables.host.forked:
        tables.check_own()
    check_custom_scores(tables, feature_tables, ids, scores)
    if scores is not None:
        scores = scores.contiguous()  # before ids get rows: the op that sets scores needs it
    layout = tables.config.layout
    if feature_policies is None:
        feature_policies = list(feature_tables) if layout.rows else []
    before = 0 if tables.evictions.rows is None else int(tables.index.evicted[0, 0])
    admit = _admitted_by_hooks(tables, ids, offsets, feature_tables)
    handles = ops.find_or_insert_(
        tables.index, ids, offsets, admit, feature_tables, feature_policies
    )
    add_custom_scores(tables, ids, offsets, feature_tables, feature_policies, scores)
    keep_evicted_rows(tables, before)
    return handles


def reserve_space(tables: Tables, batch: LookupBatch) -> None:
    """Reserve space on disk for the ids of a training lookup, before they are inserted.

    Counts of ids are unchanged after an error, so the step can be repeated.

    Raises:
        NoRoomError: the disk is full.
        RuntimeError: the store has failed.
        ForkedProcessError: this process is a fork of the one that made the tables.
    """
    if tables.tiers is None:
        return
    _check_has_store(tables)
    tables.tiers.reserve_space(tables.index, batch)


def stage(tables: Tables, batch: LookupBatch, handles: Tensor) -> Tensor:
    """Load the rows of a training lookup into memory; return the handles to train with.

    Args:
        handles: int64 [N], of the ids in the index.
    """
    if tables.tiers is None:
        return handles
    _check_has_store(tables)
    staged = ops.StagedIds.of(tables.index.meta, batch, handles)
    return tables.tiers.stage(staged, trains=True)


def read(tables: Tables, batch: LookupBatch, handles: Tensor) -> Tensor:
    """Look rows up without training.

    Args:
        handles: int64 [N], of the ids in the index.

    Returns:
        float32 [B, sum of feature_dims], or [N, dim] without pooling.
    """
    if tables.tiers is not None:
        _check_has_store(tables)
        return tables.tiers.lookup(batch, handles)
    return ops.embedding_inference(tables.rows, batch, handles)


def find_and_read(tables: Tables, batch: LookupBatch) -> Tensor:
    """Find ids and :func:`read` their rows; expired ids count as missing.

    Returns:
        As :func:`read`.
    """
    if tables.read_by_one_op:
        return ops.find_and_read(tables.index, tables.rows, batch)
    handles = find(tables, *batch.index_arguments).handles
    return read(tables, batch, without_expired(tables, *batch.index_arguments, handles))


def _check_has_store(tables: Tables) -> None:
    """Raise ForkedProcessError in a fork, which cannot load rows from the store."""
    if tables.host.forked:
        raise ForkedProcessError(
            "this process is a fork of the one that made the tables, and the rows are in a store: "
            "only that process can look them up. Do so there, or in its threads, and let workers "
            "of a DataLoader give ids; or give them td.freeze(model), which has all rows in memory"
        )


def prefetch(
    tables: Tables,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    *,
    ahead: int = 1,
) -> None:
    """Start to load rows as :meth:`torch_dynemb.TableGroup.prefetch` does."""
    ahead = integer("prefetch: ahead", ahead, least=1)
    if tables.tiers is None:
        return
    tables.check_own()
    beside = tables.tiers.prefetches_beside
    with tables.memory.beside(ids, offsets) if beside else nullcontext():
        handles = find(tables, ids, offsets, feature_tables).handles
        staged = ops.StagedIds(tables.index.meta, ids, handles, offsets, feature_tables)
        tables.tiers.prefetch(staged, ahead=ahead)


def without_expired(
    tables: Tables, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int], handles: Tensor
) -> Tensor:
    """Return handles with those of expired ids marked as missing."""
    if "expiry" not in tables.config.layout.score_words:
        return handles
    word = tables.config.layout.word("expiry")
    expires, found = ops.get_scores(tables.index, ids, offsets, feature_tables, word=word)
    gone = found & (expires <= tables.index.clock[Clock.NOW])
    if tables.host.expiry_floors is not None:
        gone &= below_floors(tables, expires, offsets, feature_tables)
    return torch.where(gone, NO_HANDLE, handles)


def _admitted_by_hooks(
    tables: Tables, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int]
) -> Tensor | None:
    """Return the hooks' decisions, bool [N], or None if no table has a hook."""
    hooked = sorted({t for t in feature_tables if tables.config.hooked[t]})
    if not hooked:
        return None
    known = find(tables, ids, offsets, feature_tables).handles >= 0
    admitted = torch.ones_like(known)
    for t in hooked:
        table = tables.config.tables[t]
        rule = table.policy.admission
        assert isinstance(rule, AdmitBy)
        with torch.no_grad():
            new = NewIds(ids, known, tables.index.clock[:1], table.name)
            mask = admission_hook(rule.name)(new)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != ids.shape:
            what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            raise TypeError(
                f"admission hook {rule.name!r} returned {what}, expected a bool tensor of "
                f"shape {tuple(ids.shape)}"
            )
        if any(other != t for other in feature_tables):
            of_table = by_feature(feature_tables, ids, offsets) == t
            mask = mask | ~of_table
        admitted = admitted & mask
    return admitted


__all__ = [
    "find",
    "find_and_read",
    "find_or_insert",
    "prefetch",
    "read",
    "reserve_space",
    "stage",
    "without_expired",
]
