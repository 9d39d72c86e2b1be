"""Custom scores that are given as numbers of another kind."""

from __future__ import annotations

import torch
from torch import Tensor


def custom_scores(numbers: Tensor) -> Tensor:
    """Return numbers as custom scores, int64 of their shape.

    Floats are rounded to the nearest integer, half to even. What is not finite counts as 0.

    Args:
        numbers: integers or floats; floats below 2^63 in magnitude.
    """
    if not numbers.is_floating_point():
        return numbers.to(torch.int64)
    return numbers.detach().double().nan_to_num(0.0, 0.0, 0.0).round().to(torch.int64)


__all__ = ["custom_scores"]
