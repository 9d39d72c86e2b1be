"""Area under the ROC curve: exact for a held-out set, running for a stream."""

from __future__ import annotations

import numpy.typing as npt
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc


def exact_auc(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Return the area under the ROC curve by torchmetrics, ties counting one half.

    Args:
        labels: (N,) 0 or 1.
        scores: (N,) probabilities or log-odds.

    Returns:
        From 0 to 1; NaN, not torchmetrics' 0, if only one of the labels occurs.

    Example:
        >>> exact_auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])
        0.75
    """
    target = torch.as_tensor(labels).long()
    if len(target.unique()) < 2:
        return float("nan")
    return float(binary_auroc(torch.as_tensor(scores).double(), target))


class RunningAUC:
    """AUC of a stream in constant memory; the past fades.

    Probabilities are counted in equal bins, per label; a bin counts as a tie. Each update first
    fades the earlier counts: samples seen ``half_life`` samples ago weigh one half.

    Args:
        half_life: In samples.
        bins: Number of bins.

    Example:
        >>> auc = RunningAUC(half_life=1000)
        >>> auc.update(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0.1, 0.4, 0.35, 0.8]))
        >>> auc.compute()
        0.75
    """

    def __init__(self, half_life: float, *, bins: int = 4096) -> None:
        self.half_life = half_life
        self.counts = torch.zeros(2, bins, dtype=torch.float64)
        """Weights of negatives and of positives by bin: the whole state."""

    def update(self, labels: Tensor, probabilities: Tensor, *, passed: int | None = None) -> None:
        """Count samples.

        Args:
            labels: (B,) float, 0 or 1.
            probabilities: (B,) float from 0 to 1.
            passed: Samples by which the past fades; None: B. Ranks that count parts of the same
                batches give the size of the whole one: their counts add up to those of the stream.
        """
        bins = self.counts.shape[1]
        positions = (probabilities * bins).long().clamp_(0, bins - 1) + bins * labels.long()
        self.counts *= 0.5 ** ((len(labels) if passed is None else passed) / self.half_life)
        self.counts += torch.bincount(positions, minlength=2 * bins).view(2, bins)

    def compute(self) -> float:
        """Return the AUC; NaN until both labels have occurred."""
        negatives, positives = self.counts
        below = negatives.cumsum(0) - negatives / 2
        pairs = negatives.sum() * positives.sum()
        return float((positives * below).sum() / pairs) if pairs > 0 else float("nan")
