"""CUDA kernels against the CPU's, on an emulator (tests/emulator): every integer, every bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulator.mode import EmulatedCuda, set_seed
from group_calls import same_bits
from op_cases import CASES, Case
from torch import Tensor
from torch.utils import _pytree as pytree

# Ops without a kernel of their own for CUDA tensors.
HOST_ONLY = {"reserve", "available_memory", "simd_level", "set_simd_level"}
# A sum over a row, by one order on the CPU's lanes and another on a GPU's.
ROUNDED = ("rowwise_adagrad_", "bag_weight_grad")

OP_CASES = [
    pytest.param(name, case, id=f"{name} {kind}".strip())
    for name, cases in CASES.items()
    if name not in HOST_ONLY
    for kind, case in cases.items()
]


@pytest.fixture(params=[0, 1, 2], ids="seed {}".format)
def seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """Orders in which the emulator runs threads and blocks."""
    set_seed(request.param)
    yield request.param
    set_seed(0)


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize(("name", "case"), OP_CASES)
def test_an_op_does_what_the_cpu_does(name: str, case: Case, seed: int) -> None:
    op = getattr(torch.ops.dynemb, name)
    arguments, emulated_arguments = case(), case()
    expected = op(*arguments)
    with EmulatedCuda() as cuda:
        given = op(*emulated_arguments)
    assert name in cuda.redirected
    pairs = list(
        zip(tensors_of((expected, arguments)), tensors_of((given, emulated_arguments)), strict=True)
    )
    assert pairs or name == "set_simd_level"
    for position, (on_cpu, on_cuda) in enumerate(pairs):
        if name.startswith(ROUNDED) and on_cpu.dtype == torch.float32:
            torch.testing.assert_close(on_cuda, on_cpu, rtol=1e-5, atol=1e-6)
        else:
            assert same_bits(on_cpu, on_cuda), (position, on_cpu, on_cuda)
