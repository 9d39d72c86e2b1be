"""Area under the ROC curve, and the standard error of a difference of two on the same samples."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Placements(NamedTuple):
    """Scores of a model, each as its place among those of the other label.

    Attributes:
        positive: float64 [P], the share of negatives below each positive; ties count one half.
        negative: float64 [N], the share of positives above each negative.
    """

    positive: Tensor
    negative: Tensor

    @property
    def auc(self) -> float:
        """Probability that a positive scores above a negative; ties count one half."""
        return float(self.positive.mean())


def placements(labels: Tensor, scores: Tensor) -> Placements:
    """Return the placements of scores.

    Args:
        labels: bool [n], of both values.
        scores: float [n].
    """
    positive, negative = scores[labels], scores[~labels]
    return Placements(_below(positive, negative), 1 - _below(negative, positive))


def _below(scores: Tensor, others: Tensor) -> Tensor:
    """Return the share of the others below each score; ties count one half."""
    others = others.sort().values
    below = torch.searchsorted(others, scores)
    up_to = torch.searchsorted(others, scores, right=True)
    return (below + up_to).double() / (2 * others.numel())


def error_of_difference(one: Placements, other: Placements) -> float:
    """Return the standard error of the difference of two AUC (DeLong et al. 1988).

    Args:
        one, other: of two models, for the same samples in the same order.
    """
    variance = 0.0
    for a, b in ((one.positive, other.positive), (one.negative, other.negative)):
        if a.numel() > 1:
            variance += float((a - b).var()) / a.numel()
    return math.sqrt(variance)


__all__ = ["Placements", "error_of_difference", "placements"]
