"""Hashes of byte strings of many features: a list has an entry for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.columns import StringHash

_STRING_HASH = torch.ops.dynemb.string_hash.default
# plain ints: an op takes half a microsecond longer to read a member of an enum
_FARM, _MURMUR3, _MURMUR64A = map(int, StringHash)


@raises_typed_errors
def farmhash(values: Sequence[Tensor], offsets: Sequence[Tensor]) -> list[Tensor]:
    """Compute FarmHash Fingerprint64 of strings.

    This is ``farmhashna::Hash64`` of Google's FarmHash. TensorFlow's
    ``tf.strings.to_hash_bucket_fast`` takes it modulo the number of buckets, and
    ``FARM_FINGERPRINT`` of BigQuery returns it.

    Args:
        values: uint8 or int8 [bytes] for each feature, string after string.
        offsets: int64 [n + 1] for each feature, where strings begin in ``values``.

    Returns:
        int64 [n] for each feature: the 64 bits as a signed number.

    Raises:
        RuntimeError: a dtype or shape does not match, the lists differ in length, a tensor is not
            contiguous, or offsets are not ascending from 0 to the number of bytes. A GPU reports
            wrong offsets in a later call, and hashes the bytes within range.

    Example:
        >>> text = torch.tensor(list(b"foobar"), dtype=torch.uint8)
        >>> farmhash([text], [torch.tensor([0, 3, 6])])
        [tensor([6150913649986995171,  -98778129085727977])]
    """
    return _hash(values, offsets, _FARM)


@raises_typed_errors
def murmurhash(
    values: Sequence[Tensor], offsets: Sequence[Tensor], *, seed: int = 0
) -> list[Tensor]:
    """Compute the first 64 bits of MurmurHash3_x64_128 of strings (Appleby, SMHasher).

    Args:
        values: uint8 or int8 [bytes] for each feature, string after string.
        offsets: int64 [n + 1] for each feature, where strings begin in ``values``.
        seed: 0 to 2^32 - 1.

    Returns:
        int64 [n] for each feature: the 64 bits as a signed number.

    Raises:
        RuntimeError: as :func:`farmhash`, or the seed is out of range.

    Example:
        >>> text = torch.tensor(list(b"foo"), dtype=torch.uint8)
        >>> murmurhash([text], [torch.tensor([0, 3])])
        [tensor([-2129773440516405919])]
    """
    return _hash(values, offsets, _MURMUR3, seed)


@raises_typed_errors
def murmurhash64a(
    values: Sequence[Tensor], offsets: Sequence[Tensor], *, seed: int = 0
) -> list[Tensor]:
    """Compute MurmurHash64A of strings: MurmurHash2 for 64-bit machines (Appleby, SMHasher).

    With seed 0 it is RecIS's "murmur"; with seed ``0xDECAFCAFFE`` it is TensorFlow's ``Hash64``.

    Args:
        values: uint8 or int8 [bytes] for each feature, string after string.
        offsets: int64 [n + 1] for each feature, where strings begin in ``values``.
        seed: 64 bits as a signed number.

    Returns:
        int64 [n] for each feature: the 64 bits as a signed number.

    Raises:
        RuntimeError: as :func:`farmhash`.

    Example:
        >>> text = torch.tensor([0, 1, 2], dtype=torch.uint8)
        >>> murmurhash64a([text], [torch.tensor([0, 3])])
        [tensor([-4003751876240412087])]
    """
    return _hash(values, offsets, _MURMUR64A, seed)


def _hash(
    values: Sequence[Tensor], offsets: Sequence[Tensor], kind: int, seed: int = 0
) -> list[Tensor]:
    if not values and not offsets:
        return []
    hashes: list[Tensor] = _STRING_HASH(list(values), list(offsets), kind, seed)
    return hashes


@register_fake("string_hash")
def _string_hash_fake(
    values: list[Tensor], offsets: list[Tensor], kind: int, seed: int
) -> list[Tensor]:
    return [offset.new_empty((offset.shape[0] - 1,)) for offset in offsets]
