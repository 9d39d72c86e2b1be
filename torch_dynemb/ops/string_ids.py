"""Ids of strings, as data frames, files and lists have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.ops.strings import farmhash

# Arrow's types of strings and bytes, and those with offsets of 64 bits
_ARROW = {
    "string": "large_string",
    "large_string": "large_string",
    "string_view": "large_string",
    "binary": "large_binary",
    "large_binary": "large_binary",
    "binary_view": "large_binary",
}


def hash_strings(values: Any, *, null: int | None = None) -> Tensor:
    """Hash strings to ids, by FarmHash Fingerprint64 of their UTF-8 (see :func:`farmhash`).

    The same string has the same id in each kind of ``values``, in training and in serving. numpy's
    strings lack trailing NUL letters, so those have the id of the string without them.

    Args:
        values: a list or tuple of str; a numpy array of dtype U, S, object or StringDType; a
            pyarrow array or chunked array of strings, binary or dictionaries of them. Bytes are
            hashed as they are.
        null: id of None, NaN, as pandas has it, and Arrow's nulls; None: they raise an error.

    Returns:
        int64 [n], or of the shape of a numpy array.

    Raises:
        TypeError: values is of another type, or an element is not a string.
        ValueError: values has a null and ``null`` is None, or a str has half of a surrogate pair.

    Example:
        >>> hash_strings(["foo", "bar", None], null=0)
        tensor([6150913649986995171,  -98778129085727977,                   0])
    """
    if null is not None:
        null = integer("hash_strings: null", null)
    if type(values).__module__.partition(".")[0] == "pyarrow":
        hashes, nulls = _of_arrow(values)
    elif isinstance(values, np.ndarray):
        hashes, nulls = _of_numpy(values.reshape(-1))
        hashes, nulls = hashes.reshape(values.shape), nulls.reshape(values.shape)
    elif isinstance(values, list | tuple):
        hashes, nulls = _of_list(values)
    else:
        raise TypeError(
            f"hash_strings: values is {described(values)}, expected a list, or an array of numpy "
            "or pyarrow: a pandas Series has to_numpy()"
        )
    if bool(nulls.any()):
        if null is None:
            place = int(nulls.reshape(-1).nonzero()[0])
            raise ValueError(
                f"hash_strings: values has {int(nulls.sum())} nulls, the first at {place}: give "
                "null=, the id for them, or leave them out"
            )
        hashes.masked_fill_(nulls, null)
    return hashes


def _of_bytes(data: bytearray | np.ndarray[Any, Any], lengths: Any) -> Tensor:
    """Hash strings that follow one another."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    content = (
        torch.frombuffer(data, dtype=torch.uint8)
        if len(data)
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return farmhash([content], [torch.from_numpy(offsets)])[0]


def _of_list(values: Sequence[Any]) -> tuple[Tensor, Tensor]:
    nulls = torch.zeros(len(values), dtype=torch.bool, device="cpu")
    try:
        encoded = list(map(str.encode, values))
    except (TypeError, UnicodeEncodeError):  # an element that is not a plain str
        encoded = [_encoded(value, place) for place, value in enumerate(values)]
        nulls = torch.tensor([_is_null(value) for value in values], device="cpu")
    return _of_bytes(bytearray(b"".join(encoded)), np.fromiter(map(len, encoded), np.int64)), nulls


def _encoded(value: object, place: int) -> bytes:
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"hash_strings: values[{place}] is {described(value)}, expected text that UTF-8 "
                f"can encode: {error.reason}"
            ) from None
    if _is_null(value):
        return b""
    raise TypeError(
        f"hash_strings: values[{place}] is {described(value)}, expected a str, bytes or None"
    )


def _is_null(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _of_numpy(values: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    if values.dtype.kind not in "US":
        return _of_list(values.tolist())
    if values.dtype.kind == "U":
        try:
            values = np.char.encode(values, "utf-8")
        except UnicodeEncodeError:
            return _of_list(values.tolist())  # which raises it by its place
    width = values.dtype.itemsize
    lengths = np.char.str_len(values)
    letters = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), width)
    content = letters[np.arange(width) < lengths[:, None]]
    return _of_bytes(content, lengths), torch.zeros(len(values), dtype=torch.bool, device="cpu")


def _of_arrow(values: Any) -> tuple[Tensor, Tensor]:
    """Hash an array, or a chunked one, of pyarrow, which this module does not import."""
    if hasattr(values, "chunks"):
        parts = [_of_list([]), *map(_of_arrow, values.chunks)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    nulls = torch.from_numpy(np.array(values.is_null().to_numpy(zero_copy_only=False)))
    kind = str(values.type)
    is_dictionary = kind.startswith("dictionary")
    if kind not in (*_ARROW, "null") and not is_dictionary:
        raise TypeError(
            f"hash_strings: values is a pyarrow array of {kind}, expected strings: cast it"
        )
    if bool(nulls.all()):  # the empty array, too, which may have no buffers
        return torch.zeros(len(nulls), dtype=torch.int64, device="cpu"), nulls
    if is_dictionary:
        hashes, absent = _of_arrow(values.dictionary)
        words = values.indices.fill_null(0).to_numpy(zero_copy_only=False)
        chosen = torch.from_numpy(np.array(words, dtype=np.int64))
        return hashes[chosen], nulls | absent[chosen]
    array = values.cast(_ARROW[kind])
    _, offsets, content = array.buffers()
    places = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    letters = np.frombuffer(content, np.uint8) if places[-1] > 0 else np.empty(0, np.uint8)
    return _of_bytes(letters[places[0] : places[-1]].copy(), np.diff(places)), nulls


__all__ = ["hash_strings"]
