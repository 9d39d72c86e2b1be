"""RecIS's hash_ops, array_ops and fused_ops: hashes, buckets and remainders of values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import integer, number, tensor
from torch_dynemb.recis.arguments import entries, index_tensors, numbers, tensors


def farmhash(inputs: Sequence[Tensor], splits: Sequence[Tensor]) -> list[Tensor]:
    """Hash strings by FarmHash Fingerprint64 (:func:`torch_dynemb.ops.farmhash`).

    Args:
        inputs: uint8 or int8 [bytes] for each feature.
        splits: int32 or int64 [n + 1] for each feature, where strings begin.

    Returns:
        int64 [n] for each feature.

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: a dtype or shape does not match, the lists differ in length, or splits do not
            ascend from 0 to the number of bytes.
    """
    return ops.farmhash(
        tensors("farmhash: inputs", inputs), index_tensors("farmhash: splits", splits)
    )


def murmurhash(inputs: Sequence[Tensor], splits: Sequence[Tensor]) -> list[Tensor]:
    """Hash strings by MurmurHash64A with seed 0 (:func:`torch_dynemb.ops.murmurhash64a`).

    Args:
        inputs: uint8 or int8 [bytes] for each feature.
        splits: int32 or int64 [n + 1] for each feature, where strings begin.

    Returns:
        int64 [n] for each feature.

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: a dtype or shape does not match, the lists differ in length, or splits do not
            ascend from 0 to the number of bytes.

    Example:
        >>> text = torch.tensor([0, 1, 2, 1, 2, 3], dtype=torch.int8)
        >>> murmurhash([text], [torch.tensor([0, 3, 6], dtype=torch.int32)])
        [tensor([-4003751876240412087, -1042754718167355375])]
    """
    return ops.murmurhash64a(
        tensors("murmurhash: inputs", inputs), index_tensors("murmurhash: splits", splits)
    )


def bucketize(input: Tensor, boundaries: Tensor | Sequence[float]) -> Tensor:
    """Count the boundaries that are at most each value.

    Args:
        input: float32, float64, int32 or int64 of any shape.
        boundaries: [n] or a list, ascending; converted to the dtype of ``input``.

    Returns:
        int64, of the shape of ``input``.

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: another dtype, or boundaries have another shape or do not ascend.
    """
    values = tensor("bucketize: input", input).contiguous()
    if not isinstance(boundaries, Tensor):
        given = entries("bucketize: boundaries", boundaries, "a tensor [n] or a list of numbers")
        for i, bound in enumerate(given):
            check = integer if isinstance(bound, int) else number
            check(f"bucketize: boundaries[{i}]", bound)
        boundaries = torch.tensor(given, device="cpu")
    if tensor("bucketize: boundaries", boundaries).is_complex():
        raise TypeError(
            f"bucketize: boundaries has dtype {boundaries.dtype}, expected real numbers"
        )
    bounds = boundaries.to(values.device, values.dtype)
    return ops.bucketize([values], [bounds.contiguous()])[0]


def bucketize_mod(input: Tensor, bucket: int) -> Tensor:
    """Return ids modulo a number, as unsigned numbers.

    Args:
        input: int64 of any shape.
        bucket: at least 1.

    Returns:
        int64, of the shape of ``input``.

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: another dtype, or ``bucket`` is less than 1.
    """
    ids = tensor("bucketize_mod: input", input).contiguous()
    return ops.mod([ids], [integer("bucketize_mod: bucket", bucket)])[0]


def multi_hash(
    input: Tensor,
    muls: Tensor | Sequence[int],
    primes: Tensor | Sequence[int],
    bucket_num: int,
) -> list[Tensor]:
    """Return ``input * mul % prime % bucket_num`` for each mul and prime (unsigned).

    Args:
        input: int64 of any shape.
        muls: int64 [hashes] or a list.
        primes: as ``muls``, each at least 1.
        bucket_num: at least 1.

    Returns:
        int64, of the shape of ``input``, for each hash.

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: another dtype, or a number is too small.
        ValueError: ``muls`` and ``primes`` differ in length.
    """
    ids = tensor("multi_hash: input", input).contiguous()
    multipliers = numbers("multi_hash: muls", muls)
    divisors = numbers("multi_hash: primes", primes)
    buckets = [integer("multi_hash: bucket_num", bucket_num)] * len(multipliers)
    return ops.multi_hash([ids], [multipliers], [divisors], [buckets])[0]


def fused_bucketize_gpu(values: Sequence[Tensor], boundaries: Sequence[Tensor]) -> list[Tensor]:
    """Call :func:`bucketize` for several features; boundaries have their dtype and device.

    Args:
        values: float32, float64, int32 or int64 of any shape, for each feature.
        boundaries: [n] for each feature, of the dtype of its values, ascending.

    Returns:
        int64, of the shape of the values, for each feature.

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: dtypes do not match, the lists differ in length, or boundaries do not ascend.
    """
    return ops.bucketize(
        tensors("fused_bucketize_gpu: values", values),
        tensors("fused_bucketize_gpu: boundaries", boundaries),
    )


def fused_uint64_mod_gpu(values: Sequence[Tensor], mods: Tensor | Sequence[int]) -> list[Tensor]:
    """Call :func:`bucketize_mod` for several features, each with its own number.

    Args:
        values: int64 of any shape, for each feature.
        mods: int64 [features] or a list: the number of each feature, at least 1.

    Returns:
        int64, of the shape of the values, for each feature.

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: another dtype, the lists differ in length, or a number is less than 1.
    """
    return ops.mod(
        tensors("fused_uint64_mod_gpu: values", values), numbers("fused_uint64_mod_gpu: mods", mods)
    )


def fused_multi_hash(
    inputs: Sequence[Tensor],
    muls: Sequence[Tensor | Sequence[int]],
    primes: Sequence[Tensor | Sequence[int]],
    bucket_nums: Sequence[Tensor | Sequence[int]],
) -> list[Tensor]:
    """Call :func:`multi_hash` for several features; hashes of one feature are adjacent.

    Args:
        inputs: int64 of any shape, for each feature.
        muls: int64 [hashes] or a list, for each feature.
        primes, bucket_nums: as ``muls``, at least 1.

    Returns:
        int64, of the shape of the feature's ids, for each hash.

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: another dtype, or a number is too small.
        ValueError: the lists differ in length.
    """
    named = {"muls": muls, "primes": primes, "bucket_nums": bucket_nums}
    parameters = [_numbers_of_features(name, given) for name, given in named.items()]
    hashes = ops.multi_hash(tensors("fused_multi_hash: inputs", inputs), *parameters)
    return [result for results in hashes for result in results]


def _numbers_of_features(name: str, given: object) -> list[list[int]]:
    owner = f"fused_multi_hash: {name}"
    of_features = entries(owner, given, "a list of tensors [hashes] or of lists")
    return [numbers(f"{owner}[{i}]", of_one) for i, of_one in enumerate(of_features)]


__all__ = [
    "bucketize",
    "bucketize_mod",
    "farmhash",
    "fused_bucketize_gpu",
    "fused_multi_hash",
    "fused_uint64_mod_gpu",
    "multi_hash",
    "murmurhash",
]
