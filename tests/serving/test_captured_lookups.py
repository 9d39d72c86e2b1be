"""Frozen lookups inside captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from emulated_groups import emulated_cuda
from emulator.mode import forbidden_calls, launches, set_capturing
from test_freeze import assert_same, each_case, trained
from torch import nn

import torch_dynemb as td

pytestmark = pytest.mark.own_device


@pytest.fixture
def end_of_capture() -> Iterator[None]:
    yield
    set_capturing(False)


@each_case
def test_capture(
    make: Callable[[], nn.Module],
    seen: tuple[Any, ...],
    unseen: tuple[Any, ...],
    end_of_capture: None,
) -> None:
    """On the emulator, capture is a flag: no call that CUDA forbids then is made."""
    with emulated_cuda():
        frozen = td.freeze(trained(make, seen))
        expected = [frozen(*arguments) for arguments in (seen, unseen)]
        before, started = forbidden_calls(), launches()
        set_capturing(True)
        within = [frozen(*arguments) for arguments in (seen, unseen)]
        set_capturing(False)
        assert forbidden_calls() == before
        assert launches() > started
    for output, other in zip(within, expected, strict=True):
        assert_same(output, other)
