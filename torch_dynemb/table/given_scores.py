"""Custom scores that are given as numbers of another kind."""

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


__all__ = ["custom_scores"]
