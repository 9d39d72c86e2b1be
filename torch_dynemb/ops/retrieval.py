"""Ops of retrieval: ids sampled from a table, and the largest scores of many candidates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.recomputation import always_saved
from torch_dynemb.ops.tensors import IndexTensors


class BestScores(NamedTuple):
    """Result of :func:`merge_top_k`.

    Attributes:
        scores: float32 [n, k], descending; -infinity where there are fewer candidates.
        ids: int64 [n, k], ascending among equal scores; -1 where there are fewer candidates.
    """

    scores: Tensor
    ids: Tensor


@raises_typed_errors
def sample_ids(index: IndexTensors, seed: Tensor, *, table: int, samples: int) -> Tensor:
    """Draw ids of a table with replacement, each with the same probability.

    A sample tries random slots of the index, and after 64 empty ones takes the id of a random rank.
    So it is uniform at any load, and at a load of 70 % needs 1.4 tries. The result depends on the
    index and the seed alone: devices and numbers of threads give the same ids.

    Args:
        index: of the tables; nothing changes.
        seed: int64 [1].
        table: 0 to ``T + C - 1``.
        samples: at least 0.

    Returns:
        int64 [samples]. Removed ids are never drawn, expired ones are until they are removed.

    Raises:
        RuntimeError: the table is empty, a number is out of range, or tensors do not fit each
            other. On a GPU, an empty table is reported by a later op.
    """
    ids: Tensor = torch.ops.dynemb.sample_ids(
        index.buckets, index.tables, index.meta, table, seed, samples
    )
    return ids


@raises_typed_errors
def merge_top_k(scores: Tensor, ids: Tensor, best: BestScores) -> BestScores:
    """Merge candidates into the best results so far, query by query.

    Args:
        scores: float32 [n, c], of each query and candidate. Those with -infinity or NaN are left
            out.
        ids: int64 [c], of the candidates.
        best: of earlier candidates, k of each query.

    Returns:
        The k largest scores of both; of equal scores those with the least ids.

    Raises:
        RuntimeError: dtype, shape or device of a tensor.

    Example:
        >>> best = BestScores(torch.tensor([[2.0, 1.0]]), torch.tensor([[7, 8]]))
        >>> merge_top_k(torch.tensor([[1.0, 3.0]]), torch.tensor([5, 6]), best).ids
        tensor([[6, 7]])
    """
    return BestScores(*torch.ops.dynemb.merge_top_k(scores, ids, best.scores, best.ids))


@register_fake("sample_ids")
def _sample_ids_fake(
    buckets: Tensor, tables: Tensor, meta: Tensor, table: int, seed: Tensor, samples: int
) -> Tensor:
    return tables.new_empty((samples,))


@register_fake("merge_top_k")
def _merge_top_k_fake(
    scores: Tensor, ids: Tensor, best_scores: Tensor, best_ids: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(best_scores), torch.empty_like(best_ids)


always_saved("sample_ids")
