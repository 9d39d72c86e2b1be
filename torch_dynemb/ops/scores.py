"""Ops on the scores of ids: get, set, combine.

Arguments and errors are those of :mod:`torch_dynemb.ops.index`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.index import ScoredIds, check_ids
from torch_dynemb.ops.tensors import IndexTensors


@raises_typed_errors
def get_scores(
    index: IndexTensors,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    *,
    word: int,
) -> ScoredIds:
    """Return one score word of ids; nothing changes.

    Args:
        index: of the tables; nothing changes.
        ids, offsets, feature_tables: see :mod:`torch_dynemb.ops.index`.
        word: 0 to the number of words per id - 1; 0 is the step.

    Raises:
        TypeError, ValueError: dtype, shape or device of ids or offsets.
        RuntimeError: as :func:`torch_dynemb.ops.find`; the index keeps fewer words, or the table
            keeps no scores.
    """
    check_ids("get_scores", index, ids, offsets)
    return ScoredIds(
        *torch.ops.dynemb.get_scores(
            index.buckets,
            index.scores,
            index.tables,
            index.meta,
            ids,
            offsets,
            list(feature_tables),
            word,
        )
    )


@raises_typed_errors
def set_scores_(
    index: IndexTensors,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    values: Tensor,
    *,
    word: int,
) -> Tensor:
    """Set one score word of the ids that are in their tables.

    Args:
        index: of the tables; scores change.
        ids, offsets, feature_tables: see :mod:`torch_dynemb.ops.index`.
        values: int64 [N]; the largest counts if an id occurs several times.
        word: as in :func:`get_scores`.

    Returns:
        bool [N]; true for ids that are in their tables.

    Raises:
        TypeError, ValueError: dtype, shape or device of ids or offsets, dtype or shape of values.
        RuntimeError: as :func:`get_scores`, or device of values.
    """
    check_ids("set_scores_", index, ids, offsets)
    _check_values("set_scores_", values, ids)
    found: Tensor = torch.ops.dynemb.set_scores_(
        index.buckets,
        index.scores,
        index.tables,
        index.meta,
        ids,
        offsets,
        list(feature_tables),
        values,
        word,
    )
    return found


@raises_typed_errors
def combine_scores_(
    index: IndexTensors,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    values: Tensor,
    *,
    combines: Sequence[int],
    half_lives: Sequence[int],
    word: int,
) -> None:
    """Combine one score word of the ids that are in their tables with given scores.

    Args:
        index: of the tables; scores change.
        ids, offsets, feature_tables: see :mod:`torch_dynemb.ops.index`.
        values: int64 [N]; for ``Combine.DECAYED_SUM`` the bits of float64, of which those that are
            not above 0, or not finite, count as 0.
        combines: F values of ``Combine``.
        half_lives: F half-lives in seconds, below 0 in steps; 0 for features that do not decay.
        word: as in :func:`get_scores`.

    Raises:
        TypeError, ValueError: dtype, shape or device of ids or offsets, dtype or shape of values.
        RuntimeError: as :func:`get_scores`, device of values, or wrong combines or half_lives.
    """
    check_ids("combine_scores_", index, ids, offsets)
    _check_values("combine_scores_", values, ids)
    torch.ops.dynemb.combine_scores_(
        index.buckets,
        index.scores,
        index.tables,
        index.meta,
        index.clock,
        ids,
        offsets,
        list(feature_tables),
        values,
        list(combines),
        list(half_lives),
        word,
    )


def _check_values(op: str, values: Tensor, ids: Tensor) -> None:
    """Raise TypeError or ValueError unless there is an int64 for each id."""
    if values.dtype != torch.int64:
        raise TypeError(f"{op}: values has dtype {values.dtype}, expected int64")
    if values.shape != ids.shape:
        raise ValueError(
            f"{op}: values has shape {tuple(values.shape)}, expected that of ids, "
            f"{tuple(ids.shape)}"
        )


@register_fake("get_scores")
def _get_scores_fake(
    buckets: Tensor,
    scores: Tensor,
    tables: Tensor,
    meta: Tensor,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    word: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(ids, dtype=torch.bool)


@register_fake("set_scores_")
def _set_scores_fake(
    buckets: Tensor,
    scores: Tensor,
    tables: Tensor,
    meta: Tensor,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    values: Tensor,
    word: int,
) -> Tensor:
    return torch.empty_like(ids, dtype=torch.bool)


@register_fake("combine_scores_")
def _combine_scores_fake(
    buckets: Tensor,
    scores: Tensor,
    tables: Tensor,
    meta: Tensor,
    clock: Tensor,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    values: Tensor,
    combines: Sequence[int],
    half_lives: Sequence[int],
    word: int,
) -> None:
    return None
