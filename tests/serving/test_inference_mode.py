"""Frozen lookups in inference mode, in which serving runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_freeze import assert_same, each_case, trained
from torch import nn

import torch_dynemb as td

pytestmark = pytest.mark.any_device


@each_case
def test_inference_mode(
    make: Callable[[], nn.Module], seen: tuple[Any, ...], unseen: tuple[Any, ...]
) -> None:
    module = trained(make, seen)
    with torch.inference_mode():
        frozen = td.freeze(module)  # its buffers are inference tensors
        within = [frozen(*arguments) for arguments in (seen, unseen)]
    for arguments, output in zip((seen, unseen), within, strict=True):
        assert_same(output, module.eval()(*arguments))
        assert_same(output, frozen(*arguments))
