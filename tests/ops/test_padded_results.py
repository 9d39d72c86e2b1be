"""Arguments of ragged ops that ask for gigabytes of padding are refused before they are written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from emulated_groups import emulated_cuda
from torch import Tensor

from torch_dynemb import ops

pytestmark = pytest.mark.own_device

HUGE = 300_000_000


def to_dense() -> list[Tensor]:
    return ops.ragged_to_dense([torch.arange(3)], [[torch.tensor([0, 2, 3])]], lengths=[[HUGE]])


def to_deep_dense() -> list[Tensor]:
    outer, inner = torch.tensor([0, 2]), torch.tensor([0, 2, 3])
    return ops.ragged_to_dense([torch.arange(3)], [[outer, inner]], lengths=[[HUGE, 2]])


def tile() -> list[Tensor]:
    offsets = torch.tensor([0, 1])
    return ops.ragged_tile(
        torch.ones(1, 4), torch.tensor([0]), offsets, features=1, tile_lens=[HUGE]
    )


def cutoff() -> object:
    offsets = torch.tensor([0, 1])
    return torch.ops.dynemb.ragged_cutoff_3d(
        [torch.arange(1)], [offsets], [offsets], [], [], [HUGE], [0], [1]
    )


@pytest.mark.parametrize("emulated", [False, True], ids=["cpu", "emulated"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (to_dense, r"lengths\[0\] is 300000000, .* padding, .* can have more than 3\."),
        (to_deep_dense, r"lengths\[0\] is 300000000, .* padding, .* can have more than 2\."),
        (tile, r"tile_lens\[0\] is 300000000, .* padding, .* can have more than 1\."),
        (cutoff, r"keep_lengths\[0\] is 300000000, .* padding, .* can have more than 1\."),
    ],
    ids=["dense", "deep", "tile", "cutoff"],
)
def test_gigabytes_of_padding(call: Callable[[], object], message: str, emulated: bool) -> None:
    device = emulated_cuda() if emulated else nullcontext()
    with device, pytest.raises(RuntimeError, match=message):
        call()


def test_padding_that_is_not_large_is_written() -> None:
    (dense,) = ops.ragged_to_dense(
        [torch.arange(3)], [[torch.tensor([0, 2, 3])]], lengths=[[100]], padding_value=-1
    )
    assert dense.shape == (2, 100)
    assert int((dense == -1).sum()) == 197
