"""Names of ids, against a dict that a test fills itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("strings are on the CPU")

WORDS = ["foo", "café", None, "foo", "x", "商品", "café"]
KINDS: dict[str, Any] = {
    "list": WORDS,
    "tuple": tuple(WORDS),
    "bytes": [word and word.encode() for word in WORDS],
    "numpy": np.array(WORDS, dtype=object),
    "arrow": pa.array(WORDS),
    "dictionary": pa.array(WORDS).dictionary_encode(),
    "chunked": pa.chunked_array([WORDS[:3], WORDS[3:]]),
    "series": pd.Series(WORDS, index=range(10, 17)),
    "categories": pd.Series(WORDS, dtype="category"),
    "objects": pd.Series(WORDS, dtype=object),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_strings_is_remembered(kind: str) -> None:
    ids = td.hash_strings(KINDS[kind], null=0)
    names = td.IdNames()
    names.add(ids, KINDS[kind])
    assert names.of(ids) == WORDS
    assert names.of(ids[[3, 2, 1, 0]].reshape(2, 2)) == [["foo", None], ["café", "foo"]]
    assert names.of(torch.tensor(int(ids[4]))) == "x"
    assert (len(names), names.collisions) == (4, 0)


def test_strings_of_numpy_of_any_shape() -> None:
    words = np.array(["a", "b", "a", "c"]).reshape(2, 2)
    ids = td.hash_strings(words)
    names = td.IdNames()
    names.add(ids, words)
    assert names.of(ids) == words.tolist()


def test_the_name_added_longest_ago_goes_first() -> None:
    names = td.IdNames(capacity=3)
    names.add(torch.tensor([1, 2, 3]), ["a", "b", "c"])
    names.add(torch.tensor([1]), ["a"])
    names.add(torch.tensor([4]), ["d"])
    assert names.of(torch.arange(5)) == [None, "a", None, "c", "d"]
    assert repr(names) == "IdNames(3 names, capacity=3)"


def test_another_string_of_an_id_is_counted_and_the_first_one_stays() -> None:
    names = td.IdNames()
    names.add(torch.tensor([7, 7, 8]), ["a", "a", "b"])
    names.add(torch.tensor([7, 8]), ["other", "b"])
    assert (names.collisions, names.of(torch.tensor([7, 8]))) == (1, ["a", "b"])


def test_names_are_saved_and_loaded(tmp_path: Any) -> None:
    words = ["", "foo", "商品", "\x00", "x" * 5000]
    names = td.IdNames()
    names.add(torch.arange(5), words)
    names.add(torch.tensor([1]), ["collides"])
    model = td.DynamicEmbedding(4, name="items", optimizer=td.SGD(lr=0.1))
    td.checkpoint.save(tmp_path / "run", model, state={"names": names.state_dict()})
    report = td.checkpoint.load(tmp_path / "run", model)
    loaded = td.IdNames()
    loaded.load_state_dict(report.state["names"])
    assert loaded.of(torch.arange(5)) == words
    assert (len(loaded), loaded.collisions) == (5, 1)
    few = td.IdNames(capacity=2)
    few.load_state_dict(names.state_dict())
    assert few.of(torch.arange(5)) == [None, "foo", None, None, "x" * 5000]  # foo was added last
    empty = td.IdNames()
    empty.load_state_dict(td.IdNames().state_dict())
    assert len(empty) == 0


def test_wrong_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="IdNames: capacity is 0"):
        td.IdNames(0)
    names = td.IdNames()
    ids = torch.arange(2)
    with pytest.raises(TypeError, match=r"IdNames\.add: ids is \[1, 2\], expected an int64 tensor"):
        names.add([1, 2], ["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="values has 1 strings, expected one for each of 2 ids"):
        names.add(ids, ["a"])
    with pytest.raises(TypeError, match="values is 'ab', expected what hash_strings takes"):
        names.add(ids, "ab")
    with pytest.raises(TypeError, match="values has 3, expected a str, bytes or None"):
        names.add(ids, ["a", 3])
    with pytest.raises(TypeError, match=r"IdNames\.of: ids is 7, expected a tensor of integers"):
        names.of(7)  # type: ignore[arg-type]
    names.add(ids, ["a", "b"])
    with pytest.raises(ValueError, match="state has 1 ids, 2 letters and offsets that do not fit"):
        names.load_state_dict(names.state_dict() | {"ids": torch.tensor([1])})
    with pytest.raises(KeyError, match="ids"):
        names.load_state_dict({})
    assert names.of(ids) == ["a", "b"]
