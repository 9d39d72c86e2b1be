"""Expected load of the fullest of several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

_POINTS = 256  # at which the distribution of the maximum is evaluated
_DEVIATIONS = 9.0


def fullest(means: Tensor, variances: Tensor) -> float:
    """Return the expected maximum of independent loads.

    A load is a Poisson variable times a unit: balls in bins if all variances equal the means. The
    unit is the ratio of variance to mean, over all ranks.

    Args:
        means: float64 [ranks], at least 0.
        variances: float64 [ranks], at least 0.

    Example:
        >>> import torch
        >>> balls = torch.full((8,), 1000.0, dtype=torch.float64)
        >>> round(fullest(balls, balls))
        1045
    """
    total, most = float(means.sum()), float(means.max())
    spread = float(variances.sum())
    if total == 0 or spread == 0:
        return most
    unit = spread / total
    # loads far below the largest do not matter; equal loads are evaluated once
    near = means[means > most - 2 * _DEVIATIONS * (unit * most) ** 0.5] / unit
    rates, times = near.unique(return_counts=True)
    deviation = float(rates.max()) ** 0.5
    begin = max(0, int(float(rates.max()) - _DEVIATIONS * deviation))
    end = int(float(rates.max()) + _DEVIATIONS * deviation) + 10
    stride = max(1, (end - begin) // _POINTS)
    steps = torch.arange(begin, end, stride, dtype=torch.float64, device="cpu") + (stride - 1) / 2
    below = torch.special.gammaincc(steps[:, None] + 1, rates[None, :])  # P(Poisson <= steps)
    largest = (below.log() * times).sum(1).exp()
    return unit * (begin + stride * float((1 - largest).sum()))


__all__ = ["fullest"]
