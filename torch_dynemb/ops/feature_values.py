"""Ops on values of many features: a list has an entry per feature, one kernel does them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake


@raises_typed_errors
def mod(values: Sequence[Tensor], divisors: Sequence[int]) -> list[Tensor]:
    """Compute remainders of values, taken as unsigned 64-bit numbers.

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
    if not values:  # an op without tensors has no device
        if divisors:
            raise RuntimeError(
                f"mod: divisors has {len(divisors)} entries, expected one for each of 0 values"
            )
        return []
    results: list[Tensor] = torch.ops.dynemb.mod(list(values), list(divisors))
    return results


@register_fake("mod")
def _mod_fake(values: list[Tensor], divisors: list[int]) -> list[Tensor]:
    return [torch.empty_like(value) for value in values]


@raises_typed_errors
def bucketize(values: Sequence[Tensor], boundaries: Sequence[Tensor]) -> list[Tensor]:
    """Count the boundaries that are at most a value: ``torch.bucketize(..., right=True)``.

    Args:
        values: float32, float64, int32 or int64, of any shape, for each feature.
        boundaries: [n] of the same dtype, ascending, for each feature.

    Returns:
        int64 of the shapes of ``values``, 0 to the number of boundaries, which is also the result
        of NaN. On a GPU the order of boundaries is not checked; a wrong order gives any of these.

    Raises:
        RuntimeError: a dtype or shape does not match, the lists differ in length, a tensor is not
            contiguous, or boundaries do not ascend.

    Example:
        >>> bucketize([torch.tensor([0.5, 1.0, 9.0])], [torch.tensor([1.0, 2.0])])
        [tensor([0, 1, 2])]
    """
    if not values and not boundaries:
        return []
    results: list[Tensor] = torch.ops.dynemb.bucketize(list(values), list(boundaries))
    return results


@raises_typed_errors
def multi_hash(
    values: Sequence[Tensor],
    multipliers: Sequence[Sequence[int]],
    primes: Sequence[Sequence[int]],
    buckets: Sequence[Sequence[int]],
) -> list[list[Tensor]]:
    """Compute several hashes of a value: ``(value * multiplier % prime) % buckets``.

    Arithmetic is unsigned 64-bit, the product modulo 2^64. This is a multiplicative hash modulo a
    prime (Carter and Wegman 1979), but the overflow of the product costs its guarantees.

    Args:
        values: int64, of any shape, for each feature.
        multipliers: one for each hash of each feature.
        primes: likewise; at least 1.
        buckets: likewise; at least 1.

    Returns:
        For each feature and each of its hashes int64 of the shape of the values, less than its
        ``buckets``.

    Raises:
        RuntimeError: a dtype does not match, a tensor is not contiguous, or a number is too small.
        ValueError: the lists differ in length.

    Example:
        >>> multi_hash([torch.tensor([100, 101])], [[1, 3]], [[97, 89]], [[10, 8]])
        [[tensor([3, 4]), tensor([1, 4])]]
    """
    hashes = [len(of_feature) for of_feature in multipliers]
    for name, lists in (("primes", primes), ("buckets", buckets)):
        if [len(of_feature) for of_feature in lists] != hashes:
            raise ValueError(
                f"multi_hash: {name} has {[len(of_feature) for of_feature in lists]} entries for "
                f"the features, expected {hashes}, as multipliers"
            )
    if len(hashes) != len(values):
        raise ValueError(
            f"multi_hash: multipliers has {len(hashes)} entries, expected one for each of "
            f"{len(values)} features"
        )
    if not values:
        return []
    flat = torch.ops.dynemb.multi_hash(
        list(values),
        *(
            [number for of_feature in lists for number in of_feature]
            for lists in (multipliers, primes, buckets)
        ),
        hashes,
    )
    remaining = iter(flat)
    return [[next(remaining) for _ in range(count)] for count in hashes]


@register_fake("bucketize")
def _bucketize_fake(values: list[Tensor], boundaries: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(value, dtype=torch.int64) for value in values]


@register_fake("multi_hash")
def _multi_hash_fake(
    values: list[Tensor],
    multipliers: list[int],
    primes: list[int],
    buckets: list[int],
    hashes: list[int],
) -> list[Tensor]:
    return [
        torch.empty_like(value)
        for value, count in zip(values, hashes, strict=True)
        for _ in range(count)
    ]
