"""Ids of strings, as data frames, files and lists have them."""

from __future__ import annotations

import ctypes
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
        values: a list or tuple of str. Or a numpy array of dtype U, S, object or StringDType. Or a
            pyarrow array or chunked array of strings, binary or dictionaries of them, which is read
            where it lies. Or a pandas Series or Index of strings or categories. Bytes are hashed as
            they are.
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
    package = type(values).__module__.partition(".")[0]
    if package == "pyarrow" and hasattr(values, "is_null"):
        hashes, nulls = _of_arrow(values)
    elif package == "pandas" and hasattr(values, "dtype"):
        hashes, nulls = _of_pandas(values)
    elif isinstance(values, np.ndarray):
        hashes, nulls = _of_numpy(values.reshape(-1))
        hashes, nulls = hashes.reshape(values.shape), nulls.reshape(values.shape)
    elif isinstance(values, list | tuple):
        hashes, nulls = _of_list(values)
    else:
        raise TypeError(
            f"hash_strings: values is {described(values)}, expected a list, an array of numpy or "
            "pyarrow, or a Series of pandas: a column of a data frame is one"
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


def chosen_strings(argument: str, values: Any, places: Tensor, count: int) -> list[str | None]:
    """Return some of the strings that :func:`hash_strings` takes; None for nulls.

    Args:
        argument: name of ``values`` in errors.
        values: as for :func:`hash_strings`.
        places: int64 [m], which of them.
        count: how many ``values`` must have.

    Raises:
        TypeError: values is of another type, or an element is not a string.
        ValueError: values has another number of strings.
    """
    package = type(values).__module__.partition(".")[0]
    known = isinstance(values, list | tuple | np.ndarray)
    if not known and package not in ("pyarrow", "pandas"):
        raise TypeError(f"{argument} is {described(values)}, expected what hash_strings takes")
    if isinstance(values, np.ndarray):
        values = values.reshape(-1)
    if len(values) != count:
        raise ValueError(
            f"{argument} has {len(values)} strings, expected one for each of {count} ids"
        )
    if isinstance(values, list | tuple):
        some = [values[place] for place in places.tolist()]
    elif isinstance(values, np.ndarray):
        some = values[places.numpy()].tolist()
    elif package == "pyarrow":
        some = values.take(places.numpy()).to_pylist()
    else:
        some = values.take(places.numpy()).to_numpy(dtype=object, na_value=None).tolist()
    return [_decoded(argument, value) for value in some]


def _decoded(argument: str, value: object) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        return str(value)
    if _is_null(value):
        return None
    raise TypeError(f"{argument} has {described(value)}, expected a str, bytes or None")


def _of_bytes(data: Any, offsets: np.ndarray[Any, Any]) -> Tensor:
    """Hash strings that follow one another.

    Args:
        data: a writable buffer of their bytes.
        offsets: int64 [n + 1], where strings begin.
    """
    content = (
        torch.frombuffer(data, dtype=torch.uint8)
        if len(data)
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return farmhash([content], [torch.from_numpy(offsets)])[0]


def _offsets(lengths: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _of_list(values: Sequence[Any]) -> tuple[Tensor, Tensor]:
    nulls = torch.zeros(len(values), dtype=torch.bool, device="cpu")
    try:
        encoded = list(map(str.encode, values))
    except (TypeError, UnicodeEncodeError):  # an element that is not a plain str
        encoded = [_encoded(value, place) for place, value in enumerate(values)]
        nulls = torch.tensor([_is_null(value) for value in values], device="cpu")
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return _of_bytes(bytearray(b"".join(encoded)), _offsets(lengths)), nulls


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
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or type(value).__name__ == "NAType"  # of pandas


def _of_numpy(values: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    if values.dtype.kind not in "US":
        return _of_list(values.tolist())
    if values.size == 0 or values.dtype.itemsize == 0:
        return _of_list(values.tolist())
    lengths = np.char.str_len(values)
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    letters = values.view(np.uint32 if values.dtype.kind == "U" else np.uint8)
    letters = letters.reshape(len(values), -1)
    if values.dtype.kind == "U" and letters.max() > 127:
        return _of_list(values.tolist())  # letters of several bytes
    content = letters[np.arange(letters.shape[1]) < lengths[:, None]]
    nulls = torch.zeros(len(values), dtype=torch.bool, device="cpu")
    return _of_bytes(content.astype(np.uint8, copy=False), _offsets(lengths)), nulls


def _of_pandas(values: Any) -> tuple[Tensor, Tensor]:
    """Hash a Series, an Index or an array of pandas, which this module does not import."""
    array = getattr(values, "array", values)
    if hasattr(array, "categories"):
        hashes, absent = _of_pandas(array.categories)
        return _of_words(hashes, absent, torch.from_numpy(np.array(array.codes, np.int64)))
    if "pyarrow" in (str(getattr(array.dtype, "storage", "")), str(array.dtype)[-8:-1]):
        return _of_arrow(array.__arrow_array__())
    return _of_list(array.to_numpy(dtype=object, na_value=None).tolist())


def _of_words(hashes: Tensor, absent: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the hashes of a dictionary's words; those of a negative number are null."""
    hashes = torch.cat([hashes, hashes.new_zeros(1)])  # also of a dictionary without words
    absent = torch.cat([absent, absent.new_ones(1)])
    chosen = words.masked_fill(words < 0, len(hashes) - 1)
    return hashes[chosen], absent[chosen]


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
        words = values.indices.cast("int64").fill_null(-1).to_numpy(zero_copy_only=False)
        return _of_words(*_of_arrow(values.dictionary), torch.from_numpy(np.array(words)))
    array = values.cast(_ARROW[kind])  # letters stay where they are, but those of views
    _, offsets, content = array.buffers()
    places = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    begin, size = int(places[0]), int(places[-1] - places[0])
    # Arrow's memory is read-only, which torch warns of; nothing is written to it
    letters = (ctypes.c_ubyte * size).from_address(content.address + begin) if size > 0 else b""
    return _of_bytes(letters, places - begin), nulls


__all__ = ["chosen_strings", "hash_strings"]
