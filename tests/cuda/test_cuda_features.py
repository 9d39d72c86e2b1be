"""CUDA kernels of ops on many features, on an emulator: waiting, launches, wrong values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulator.mode import EmulatedCuda, launches, set_capturing

from torch_dynemb import ops

pytestmark = pytest.mark.own_device


@pytest.fixture(autouse=True)
def not_capturing() -> Iterator[None]:
    yield
    set_capturing(False)


def test_padded_ids_can_be_captured_and_others_say_why_not() -> None:
    ids, offsets = torch.tensor([3, 3, 5]), torch.tensor([0, 2, 3])
    with EmulatedCuda():
        set_capturing(True)
        assert ops.unique_ids(ids, offsets, padded=True).ids.tolist() == [3, 5, 0]
        with pytest.raises(RuntimeError, match="captured: give padded=True"):
            ops.unique_ids(ids, offsets)
        with pytest.raises(RuntimeError, match="captured: take ids_partition out of it"):
            ops.ids_partition(ids, offsets, parts=2)


def calls_of(features: int) -> dict[str, Callable[[], Any]]:
    ids = [torch.arange(20)] * features
    text = [torch.arange(20).byte()] * features
    offsets = [torch.tensor([0, 5, 20])] * features
    return {
        "mod": lambda: ops.mod(ids, [7] * features),
        "bucketize": lambda: ops.bucketize(ids, offsets),
        "multi_hash": lambda: ops.multi_hash(
            ids, [[1, 3]] * features, *[[[29, 47]] * features] * 2
        ),
        "farmhash": lambda: ops.farmhash(text, offsets),
        "ids_encode": lambda: ops.ids_encode(ids, list(range(features))),
        "ids_concat": lambda: ops.ids_concat(ids, bags=2, offsets=offsets),
    }


def launches_of(call: Callable[[], Any]) -> int:
    before = launches()
    call()
    return launches() - before


@pytest.mark.parametrize("name", list(calls_of(1)))
def test_any_number_of_features_is_one_launch(name: str) -> None:
    with EmulatedCuda():
        assert launches_of(calls_of(1)[name]) == 2  # with the upload
        assert launches_of(calls_of(20)[name]) == 2


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 6], r"offsets\[1\] does not begin with 0"),
        ([0, 4, 3, 6], r"offsets\[1\] decreases"),
        ([0, 5], r"offsets\[1\] does not end with the number of its values"),
        ([0, 900], r"offsets\[1\] does not end with the number of its values"),
        ([-900, 6], r"offsets\[1\] does not begin with 0"),
    ],
)
def test_wrong_offsets_of_strings_are_reported(offsets: list[int], message: str) -> None:
    text, right = torch.arange(6).byte(), torch.tensor([0, 6])
    with EmulatedCuda():
        ops.farmhash([text, text], [right, torch.tensor(offsets)])
        with pytest.raises(RuntimeError, match=rf"string_hash: {message}.*found by the GPU"):
            ops.mod([right], [5])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 3], r"offsets\[0\] is 1, expected 0"),
        ([0, 3, 2, 3], r"offsets\[2\] is less than the offset before it"),
        ([0, 7], "the last offset is 7"),
        ([0, -5, 3], r"offsets\[1\] is less"),
    ],
)
@pytest.mark.parametrize("partition", [False, True])
def test_wrong_groups_are_reported(offsets: list[int], message: str, partition: bool) -> None:
    ids, groups = torch.tensor([4, 4, 5]), torch.tensor(offsets)
    with EmulatedCuda():
        if partition:
            ops.ids_partition(ids, groups, parts=2)
        else:
            ops.unique_ids(ids, groups)
        with pytest.raises(RuntimeError, match=f"{message}.*found by the GPU"):
            ops.mod([ids], [5])


def test_many_equal_ids_in_many_groups() -> None:
    """Hash chains stay short where groups have the same ids, and positions do not matter."""
    ids = torch.arange(40).repeat(60)
    offsets = torch.arange(61) * 40
    expected = ops.ids_partition(ids, offsets, parts=3)
    with EmulatedCuda():
        given = ops.ids_partition(ids, offsets, parts=3)
    assert all(torch.equal(a, b) for a, b in zip(expected, given, strict=True))
