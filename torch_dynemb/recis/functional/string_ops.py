"""RecIS's later functions of strings and masks: hashes, decimal texts, values to leave out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, number, text
from torch_dynemb.recis.arguments import entries, index_tensors, tensors
from torch_dynemb.recis.functional.value_ops import farmhash
from torch_dynemb.recis.ragged.tensor import RaggedTensor

_LARGEST = (1 << 63) - 1
T = TypeVar("T")
_MASKED = (torch.float32, torch.float64, torch.int32, torch.int64)


def ev_farmhash(inputs: Sequence[Tensor], splits: Sequence[Tensor]) -> list[Tensor]:
    """Hash strings by :func:`farmhash` without its sign bit.

    Args:
        inputs: uint8 or int8 [bytes] for each feature.
        splits: int32 or int64 [n + 1] for each feature, where strings begin.

    Returns:
        int64 [n] for each feature, at least 0.

    Raises:
        TypeError, RuntimeError: as :func:`farmhash`.
    """
    return [hashed & _LARGEST for hashed in farmhash(inputs, splits)]


def djb2hash(inputs: Sequence[Tensor], splits: Sequence[Tensor]) -> list[Tensor]:
    """Hash strings by Bernstein's djb2: h = 33 h + byte, from 5381, modulo 2^64.

    As in RecIS, bytes are signed.

    Args:
        inputs: uint8 or int8 [bytes] for each feature.
        splits: int32 or int64 [n + 1] for each feature, where strings begin.

    Returns:
        int64 [n] for each feature.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a shape does not match, the lists differ in length, or splits do not ascend from
            0 to the number of bytes.

    Example:
        >>> djb2hash([torch.tensor(list(b"ab"), dtype=torch.int8)], [torch.tensor([0, 1, 2])])
        [tensor([177670, 177671])]
    """
    strings = _strings("djb2hash", inputs, splits)
    return [_polynomial(of_feature, base=33, seed=5381) for of_feature in strings]


def sdbmhash(inputs: Sequence[Tensor], splits: Sequence[Tensor]) -> list[Tensor]:
    """Hash strings by that of the sdbm library: h = 65599 h + byte, from 0, modulo 2^64.

    Args:
        inputs, splits: as :func:`djb2hash` takes them.

    Returns:
        int64 [n] for each feature.

    Raises:
        TypeError, ValueError: as :func:`djb2hash`.
    """
    strings = _strings("sdbmhash", inputs, splits)
    return [_polynomial(of_feature, base=65599, seed=0) for of_feature in strings]


def fused_int64_to_string_int8(inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Write ids as decimal text.

    Args:
        inputs: int64 [n] for each feature.

    Returns:
        Characters, int8 [bytes], and where texts begin, int64 [n + 1], for each feature.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ids have not 1 dimension.

    Example:
        >>> characters, begins = fused_int64_to_string_int8([torch.tensor([12, -3])])
        >>> bytes(characters[0].tolist()), begins[0]
        (b'12-3', tensor([0, 2, 4]))
    """
    owner = "fused_int64_to_string_int8: inputs"
    texts = []
    for i, ids in enumerate(tensors(owner, inputs)):
        if ids.dtype != torch.int64:
            raise TypeError(f"{owner}[{i}] has dtype {ids.dtype}, expected int64")
        if ids.dim() != 1:
            raise ValueError(f"{owner}[{i}] has shape {tuple(ids.shape)}, expected (n,)")
        texts.append(_decimal(ids))
    return [characters for characters, _ in texts], [begins for _, begins in texts]


def fused_string_mask(
    inputs: Sequence[Tensor], input_offsets: Sequence[Tensor], masks: Sequence[Sequence[str]]
) -> list[Tensor]:
    """Mark strings that are not in a list.

    Args:
        inputs: uint8 or int8 [bytes] for each feature.
        input_offsets: int32 or int64 [n + 1] for each feature, where strings begin.
        masks: strings for each feature, compared as UTF-8.

    Returns:
        float32 [n] for each feature: 0 for a string of its list, else 1.

    Raises:
        TypeError, ValueError: as :func:`djb2hash`.
    """
    owner = "fused_string_mask"
    strings = _strings(owner, inputs, input_offsets, "input_offsets")
    lists = _checked_masks(owner, masks, len(strings), text)
    return [
        _not_among(of_feature, [word.encode() for word in words])
        for of_feature, words in zip(strings, lists, strict=True)
    ]


def fused_number_mask(inputs: Sequence[Tensor], masks: Sequence[Sequence[float]]) -> list[Tensor]:
    """Mark numbers that are not in a list.

    Args:
        inputs: float32, float64, int32 or int64 of any shape, for each feature.
        masks: numbers for each feature. Floats are rounded to the dtype of the feature. An integer
            equals only the same integer, in all its 64 bits.

    Returns:
        float32, of the shape of the feature: 0 for a number of its list, else 1.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the lists differ in length.
    """
    owner = "fused_number_mask"
    values = tensors(f"{owner}: inputs", inputs)
    for i, of_feature in enumerate(values):
        if of_feature.dtype not in _MASKED:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _MASKED)
            raise TypeError(
                f"{owner}: inputs[{i}] has dtype {of_feature.dtype}, expected one of {names}"
            )
    lists = _checked_masks(owner, masks, len(values), _exact_number)
    return [
        (~torch.isin(of_feature, _as_values(numbers, of_feature))).float()
        for of_feature, numbers in zip(values, lists, strict=True)
    ]


def _strings(
    owner: str, inputs: object, splits: object, bounds_name: str = "splits"
) -> list[RaggedTensor]:
    """Check strings of features; return their signed bytes with int64 offsets."""
    given = tensors(f"{owner}: inputs", inputs)
    bounds = index_tensors(f"{owner}: {bounds_name}", splits)
    if len(given) != len(bounds):
        raise ValueError(
            f"{owner}: inputs has {len(given)} entries and {bounds_name} {len(bounds)}, expected "
            "one for each feature"
        )
    strings = []
    for i, (of_feature, begins) in enumerate(zip(given, bounds, strict=True)):
        if of_feature.dtype not in (torch.uint8, torch.int8) or of_feature.dim() != 1:
            raise TypeError(
                f"{owner}: inputs[{i}] is {described(of_feature)}, expected uint8 or int8 [bytes]"
            )
        strings.append(RaggedTensor(of_feature.view(torch.int8), begins))
    return strings


def _polynomial(strings: RaggedTensor, *, base: int, seed: int) -> Tensor:
    """Return the sum of byte * base^(bytes after it) of each string, plus seed * base^length."""
    values, (begins,) = strings.values(), strings.offsets()
    count = values.shape[0]
    powers = torch.full((count + 1,), base, dtype=torch.int64, device=values.device)
    powers[0] = 1
    powers = powers.cumprod(0)
    lengths = begins.diff()
    numbers = torch.arange(lengths.shape[0], device=values.device)
    owners = numbers.repeat_interleave(lengths, output_size=count)
    after = begins[1:][owners] - 1 - torch.arange(count, device=values.device)
    return (powers[lengths] * seed).index_add(0, owners, values.to(torch.int64) * powers[after])


def _decimal(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the characters of decimal texts, int8, and where texts begin."""
    powers = torch.tensor([10**place for place in range(18, -1, -1)], device=ids.device)
    low = torch.where(ids > 0, -ids, ids)  # the least int64 has no positive counterpart
    digits = -torch.div(low[:, None], powers, rounding_mode="trunc").fmod(10)
    shown = digits.cumsum(1) > 0
    shown[:, -1] = True
    signs = torch.full_like(digits[:, :1], ord("-"))
    characters = torch.cat([signs, digits + ord("0")], 1).to(torch.int8)
    shown = torch.cat([(ids < 0)[:, None], shown], 1)
    ends = shown.sum(1).cumsum(0)
    return characters[shown], torch.cat([ends.new_zeros(1), ends])


def _checked_masks(
    owner: str, masks: object, features: int, check: Callable[[str, object], T]
) -> list[list[T]]:
    owner = f"{owner}: masks"
    lists = entries(owner, masks, "a list for each feature")
    if len(lists) != features:
        raise ValueError(f"{owner} has {len(lists)} entries, expected {features}, one per feature")
    return [
        [
            check(f"{owner}[{i}][{j}]", value)
            for j, value in enumerate(entries(f"{owner}[{i}]", of_feature, "a list"))
        ]
        for i, of_feature in enumerate(lists)
    ]


def _exact_number(owner: str, value: object) -> float:
    return value if type(value) is int else number(owner, value)  # an int keeps all its digits


def _as_values(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers in the dtype of a tensor, without those that it cannot have."""
    if not like.is_floating_point():
        limits = torch.iinfo(like.dtype)
        whole = [int(n) for n in numbers if isinstance(n, int) or n.is_integer()]
        wanted = [n for n in whole if limits.min <= n <= limits.max]
        return torch.tensor(wanted, dtype=like.dtype, device=like.device)
    floats = [number("masks", n) for n in numbers]
    return torch.tensor(floats, dtype=like.dtype, device=like.device)


def _not_among(strings: RaggedTensor, words: Sequence[bytes]) -> Tensor:
    """Return float32 [n]: 0 for strings among the words, else 1."""
    values, (bounds,) = strings.values(), strings.offsets()
    begins, lengths = bounds[:-1], bounds.diff()
    longest = max(map(len, words), default=0)
    padded = torch.nn.functional.pad(values, (0, longest))
    found = torch.zeros_like(lengths, dtype=torch.bool)
    for word in words:
        same = lengths == len(word)
        for place, byte in enumerate(word):
            same = same & (padded[begins + place] == (byte if byte < 128 else byte - 256))
        found = found | same
    return (~found).float()


__all__ = [
    "djb2hash",
    "ev_farmhash",
    "fused_int64_to_string_int8",
    "fused_number_mask",
    "fused_string_mask",
    "sdbmhash",
]
