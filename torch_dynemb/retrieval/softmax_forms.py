"""Losses of queries from their scores against positives and shared negatives."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Form = Literal["softmax", "bce", "bpr"]
FORMS: tuple[Form, ...] = ("softmax", "bce", "bpr")


class Scored(NamedTuple):
    """A batch of queries with the rows that they are scored against.

    Attributes:
        query: float [n, dim], divided by the temperature.
        positives: float [n, dim], rows of the positives.
        candidates: float [c, dim], rows of the negatives.
        masked: bool [n, c], negatives that do not count for a query.
        log_expected: float32 [c] or [1], logarithm of how often each negative is expected among
            those of a query; None: scores are not corrected.
        positive_log_expected: float32 [n] or [1], the same of the positives.
    """

    query: Tensor
    positives: Tensor
    candidates: Tensor
    masked: Tensor
    log_expected: Tensor | None
    positive_log_expected: Tensor | None


def losses_of(form: Form, scored: Scored) -> Tensor:
    """Return the loss of each query, float32 [n].

    Scores are products in the dtype of autocast, if there is one; the rest is float32.

    Args:
        form: ``"softmax"``: the negative logarithm of the positive's share of exp(score), where a
            negative counts 1 / expected times. ``"bce"``: binary cross entropy of the positive and
            the sum of those of the negatives. ``"bpr"``: the mean of -log sigmoid(score of the
            positive - score of the negative).
        scored: the queries.
    """
    positive = (scored.query.float() * scored.positives.float()).sum(1)
    negative = (scored.query @ scored.candidates.to(scored.query.dtype).t()).float()
    if form == "softmax" and scored.log_expected is not None:
        negative = negative - scored.log_expected
    elif scored.log_expected is not None and scored.positive_log_expected is not None:
        negative = negative - scored.log_expected
        positive = positive - scored.positive_log_expected
    # not -infinity, of which the gradient of logsumexp is NaN where all are masked
    masked_score = torch.finfo(torch.float32).min / 2
    if form == "bpr":
        pairs = F.softplus(negative - positive[:, None]).masked_fill(scored.masked, 0.0)
        return pairs.sum(1) / (~scored.masked).sum(1).clamp(min=1)
    negative = negative.masked_fill(scored.masked, masked_score)
    if form == "softmax":
        return F.softplus(negative.logsumexp(1) - positive)
    return F.softplus(-positive) + F.softplus(negative).sum(1)


def masked_pairs(
    ids: Tensor, candidate_ids: Tensor, left_out: Tensor, *, in_batch: bool, hits: bool
) -> Tensor:
    """Return which negatives do not count for a query, bool [n, c].

    Args:
        ids: int64 [n], of the positives.
        candidate_ids: int64 [c], of the negatives.
        left_out: bool [c], negatives that count for no query.
        in_batch: whether the first n negatives are the positives; that of a query itself never
            counts.
        hits: whether negatives with the id of the positive are left out.
    """
    masked = left_out[None, :]
    if hits:
        return masked | (ids[:, None] == candidate_ids[None, :])
    if in_batch:
        numbers = torch.arange(candidate_ids.shape[0], device=ids.device)
        return masked | (numbers[: ids.shape[0], None] == numbers[None, :])
    return masked.expand(ids.shape[0], candidate_ids.shape[0])


__all__ = ["FORMS", "Form", "Scored", "losses_of", "masked_pairs"]
