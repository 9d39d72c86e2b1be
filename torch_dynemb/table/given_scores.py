"""Custom scores that are given as numbers of another kind, or for several occurrences of an id."""

from __future__ import annotations

import torch
from torch import Tensor


def custom_scores(numbers: Tensor, *, decays: bool) -> Tensor:
    """Return numbers as custom scores that a lookup takes, int64 or floats of their shape.

    Floats are rounded to the nearest integer, half to even, unless they are added to decayed sums.
    A number that is not finite counts as 0.

    Args:
        numbers: integers or floats; floats below 2^63 in magnitude.
        decays: whether they are added to decayed sums.
    """
    if not numbers.is_floating_point():
        return numbers.to(torch.int64)
    finite = numbers.detach().double().nan_to_num(0.0, 0.0, 0.0)
    return finite if decays else finite.round().to(torch.int64)


def scores_of_distinct(
    scores: Tensor, inverse: Tensor, distinct: Tensor, combine: str | None
) -> Tensor:
    """Combine the custom scores of the occurrences of each id, as a lookup combines them.

    Args:
        scores: int64 or float64 [N], of all occurrences.
        inverse: int64 [N], the distinct id of each occurrence.
        distinct: int64 [n], the ids.
        combine: of the table's policy.

    Returns:
        [n], of the dtype of ``scores``; sums of integers stop at the limits of int64.
    """
    sums = torch.zeros_like(distinct, dtype=scores.dtype)
    if combine not in ("sum", "decayed_sum"):
        return sums.scatter_reduce(0, inverse, scores, "amax", include_self=False)
    sums = sums.index_add(0, inverse, scores)
    if scores.is_floating_point():
        return sums
    about = torch.zeros_like(distinct, dtype=torch.float64).index_add(0, inverse, scores.double())
    limits = torch.iinfo(torch.int64)
    above = (about >= 2.0**63) | ((about > 2.0**62) & (sums < 0))
    below = (about <= -(2.0**63)) | ((about < -(2.0**62)) & (sums > 0))
    return torch.where(above, limits.max, torch.where(below, limits.min, sums))


__all__ = ["custom_scores", "scores_of_distinct"]
