"""Ids of strings, from each kind of array, against FarmHash in Python."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("strings are on the CPU")

MASK = 2**64 - 1
WORDS = ["café", "商品", "", "a", "bar", "user_1", "ad:93817", "0123456789abcdef", "💡", "naïve"]


def reference(text: str) -> int:
    """farmhashna::Hash64 of up to 16 bytes (Pike, FarmHash 1.1), as a signed number."""
    data = text.encode()
    k0, k2 = 0xC3A5C85C97CB3127, 0x9AE16A3B2F90404F
    length = len(data)

    def word(begin: int, size: int) -> int:
        return int.from_bytes(data[begin : begin + size], "little")

    def rotated(x: int, bits: int) -> int:
        return (x >> bits | x << (64 - bits)) & MASK

    def mixed(u: int, v: int, times: int) -> int:
        a = (u ^ v) * times & MASK
        a ^= a >> 47
        b = (v ^ a) * times & MASK
        return (b ^ b >> 47) * times & MASK

    times = k2 + 2 * length & MASK
    if length >= 8:
        a, b = word(0, 8) + k2 & MASK, word(length - 8, 8)
        first = rotated(b, 37) * times + a & MASK
        found = mixed(first, (rotated(a, 25) + b) * times & MASK, times)
    elif length >= 4:
        found = mixed(length + (word(0, 4) << 3), word(length - 4, 4), times)
    elif length > 0:
        y = data[0] + (data[length >> 1] << 8)
        z = length + (data[-1] << 2)
        x = (y * k2 & MASK) ^ (z * k0 & MASK)
        found = (x ^ x >> 47) * k2 & MASK
    else:
        found = k2
    return found - (found >> 63 << 64)


EXPECTED = torch.tensor([reference(word) for word in WORDS])
BYTES = [word.encode() for word in WORDS]


@pytest.mark.parametrize(
    "values",
    [
        WORDS,
        tuple(WORDS),
        BYTES,
        np.array(WORDS),
        np.array(WORDS, dtype=">U20"),
        np.array(["x", *WORDS, "y"] * 2)[1:11],
        np.array([word for word in WORDS for _ in range(2)])[::2],
        np.array(BYTES),
        np.array(WORDS, dtype=object),
        np.array(WORDS, dtype=np.dtypes.StringDType()),
        pa.array(WORDS),
        pa.array(WORDS, pa.large_string()),
        pa.array(WORDS, pa.string_view()),
        pa.array(BYTES),
        pa.array(["before", *WORDS, "after"]).slice(1, len(WORDS)),
        pa.array(WORDS).dictionary_encode(),
        pa.chunked_array([WORDS[:4], [], WORDS[4:]]),
        pa.chunked_array([pa.array(WORDS).dictionary_encode()]),
        pa.DictionaryArray.from_arrays(pa.array(range(10), pa.uint8()), pa.array(WORDS)),
        pd.Series(["before", *WORDS])[1:],
        pd.Series(WORDS, dtype=object),
        pd.Series(BYTES, dtype=object),
        pd.Series(WORDS, dtype=pd.StringDtype("python")),
        pd.Series(WORDS, dtype=pd.ArrowDtype(pa.large_string())),
        pd.Series(WORDS, dtype="category"),
        pd.Index(WORDS),
        pd.Series(WORDS).array,
        pd.Categorical(WORDS),
    ],
    ids=lambda values: (
        f"{type(values).__name__}-{getattr(values, 'dtype', getattr(values, 'type', ''))}"
    ),
)
def test_each_kind_of_array_has_the_ids_of_its_strings(values: Any) -> None:
    assert torch.equal(td.hash_strings(values), EXPECTED)


def test_strings_of_numpy_keep_their_shape() -> None:
    ids = td.hash_strings(np.array(WORDS).reshape(5, 2))
    assert torch.equal(ids, EXPECTED.reshape(5, 2))


@pytest.mark.parametrize(
    "values",
    [[], np.array([], dtype="U3"), pa.array([], pa.string()), pa.chunked_array([], pa.string())],
    ids=["list", "numpy", "arrow", "chunked"],
)
def test_no_strings(values: Any) -> None:
    ids = td.hash_strings(values)
    assert (ids.dtype, ids.shape) == (torch.int64, (0,))


@pytest.mark.parametrize(
    "values",
    [
        ["a", None, "bar"],
        np.array(["a", None, "bar"], dtype=object),
        ["a", float("nan"), "bar"],
        ["a", pd.NA, "bar"],
        pa.array(["a", None, "bar"]),
        pa.array(["a", None, "bar"]).dictionary_encode(),
        pa.DictionaryArray.from_arrays([0, 1, 2], pa.array(["a", None, "bar"])),
        pa.chunked_array([pa.array(["a"]), pa.array([None], pa.string()), pa.array(["bar"])]),
        pd.Series(["a", None, "bar"]),
        pd.Series(["a", pd.NA, "bar"], dtype=object),
        pd.Series(["a", np.nan, "bar"], dtype=pd.StringDtype("python")),
        pd.Series(["a", None, "bar"], dtype="category"),
    ],
    ids=str,
)
def test_nulls_have_the_id_that_they_are_given_or_are_refused(values: Any) -> None:
    expected = [reference("a"), -1, reference("bar")]
    assert td.hash_strings(values, null=-1).tolist() == expected
    with pytest.raises(ValueError, match=r"values has 1 nulls, the first at 1: give null="):
        td.hash_strings(values)


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ("abc", TypeError, "values is 'abc', expected a list, an array"),
        (["a", 3], TypeError, r"values\[1\] is 3, expected a str, bytes or None"),
        (np.arange(3), TypeError, r"values\[0\] is 0, expected a str"),
        (pa.array([1, 2]), TypeError, "a pyarrow array of int64, expected strings"),
        (pa.table({"ad": ["a"]}), TypeError, "values is a Table, expected a list, an array"),
        (pd.Series([1, 2]), TypeError, r"values\[0\] is 1, expected a str"),
        (pd.DataFrame({"ad": ["a"]}), TypeError, "or a Series of pandas: a column of a data"),
        (["a", "\ud800"], ValueError, r"values\[1\] is '\\ud800', expected text that UTF-8"),
        (np.array(["a", "\ud800"]), ValueError, r"values\[1\] is '\\ud800', expected text"),
    ],
    ids=["str", "element", "integers", "arrow", "table", "series", "frame", "surrogate", "numpy"],
)
def test_other_values_are_refused_by_name(values: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        td.hash_strings(values)
    with pytest.raises(TypeError, match=r"hash_strings: null is 1\.5"):
        td.hash_strings(["a"], null=1.5)  # type: ignore[arg-type]


def test_letters_of_arrow_are_read_where_they_lie() -> None:
    words = pa.array(["x" * 1000] * 1000).slice(1, 998)
    before = pa.total_allocated_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids = td.hash_strings(words)
    assert pa.total_allocated_bytes() == before
    assert torch.equal(ids, td.hash_strings(words.to_pylist()))
