"""Values of many features at once: a list has an entry for each, and one kernel does them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb._library import register_fake


def mod(values: Sequence[Tensor], divisors: Sequence[int]) -> list[Tensor]:
    """Remainders of values, taken as unsigned 64-bit numbers.

    Args:
        values: int64, of any shape, for each feature.
        divisors: for each feature, at least 1.

    Returns:
        int64 of the shapes of ``values``, 0 to ``divisors[f] - 1``.

    Raises:
        RuntimeError: a dtype does not match, a tensor is not contiguous, the lists differ in
            length, or a divisor is less than 1.

    Example:
        >>> mod([torch.tensor([12, 7]), torch.tensor([[-1]])], [10, 16])
        [tensor([2, 7]), tensor([[15]])]
    """
    if not values and not divisors:
        return []
    results: list[Tensor] = torch.ops.dynemb.mod(list(values), list(divisors))
    return results


@register_fake("mod")
def _mod_fake(values: list[Tensor], divisors: list[int]) -> list[Tensor]:
    return [torch.empty_like(value) for value in values]
