"""Losses against sampled negatives in double precision, query by query."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Negative(NamedTuple):
    """A negative of a query, and how often its id is expected; 1 without a correction."""

    id: int
    expected: float


def loss_of(
    form: str, score: Callable[[int], Tensor], positive: Negative, negatives: list[Negative]
) -> Tensor:
    """Loss of one query, float64 []."""
    right = score(positive.id)
    wrong = [score(negative.id) for negative in negatives]
    corrected = [
        each - math.log(negative.expected) for each, negative in zip(wrong, negatives, strict=True)
    ]
    if form == "softmax":
        return torch.stack([right, *corrected]).logsumexp(0) - right
    if form == "bce":
        right = right - math.log(positive.expected)
        return F.softplus(-right) + sum(F.softplus(each) for each in corrected)
    pairs = [F.softplus(each - right) for each in wrong]
    return sum(pairs, torch.zeros_like(right)) / max(1, len(pairs))


class Reference(NamedTuple):
    """Queries and the rows that they are scored against, as float64 that require grad.

    Attributes:
        query: [n, dim].
        rows: by id, [dim].
        temperature: divisor of the scores.
    """

    query: Tensor
    rows: dict[int, Tensor]
    temperature: float

    @classmethod
    def of(cls, query: Tensor, ids: Tensor, rows: Tensor, temperature: float) -> Reference:
        """Copy queries float [n, dim] and the rows of ids."""
        copies = {
            id: row.detach().cpu().double().requires_grad_()
            for id, row in zip(ids.tolist(), rows, strict=True)
        }
        return cls(query.detach().cpu().double().requires_grad_(), copies, temperature)

    def mean_loss(
        self,
        form: str,
        positives: list[int],
        drawn: list[list[int]],
        *,
        in_batch: bool,
        hits: bool,
        expected: Callable[[int, int | None], float],
        weights: list[float] | None,
    ) -> Tensor:
        """Weighted mean of the losses.

        Args:
            form: of the losses.
            positives: ids by query.
            drawn: ids of the negatives that are not of the batch, by draw.
            in_batch: whether positives of other queries are negatives.
            hits: whether negatives equal to the positive are left out.
            expected: how often an id is expected among the negatives, given also the number of the
                draw that has it; None: it is in the batch.
            weights: of the queries.
        """
        factors = [1.0] * len(positives) if weights is None else weights
        total = torch.zeros((), dtype=torch.float64)
        for i, positive in enumerate(positives):
            others = [(id, None) for j, id in enumerate(positives) if j != i] if in_batch else []
            of_draws = [(id, number) for number, ids in enumerate(drawn) for id in ids]
            negatives = [
                Negative(id, expected(id, number))
                for id, number in others + of_draws
                if not (hits and id == positive)
            ]

            def score(id: int, i: int = i) -> Tensor:
                return (self.query[i] * self.rows[id]).sum() / self.temperature

            loss = loss_of(form, score, Negative(positive, expected(positive, None)), negatives)
            total = total + factors[i] * loss
        return total / sum(factors)
