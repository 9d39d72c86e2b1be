"""CUDA kernels against the CPU's: every integer and nearly every bit.

On an emulator (tests/emulator), and on a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from emulator import mode as emulator
from emulator.mode import EmulatedCuda
from group_calls import same_bits, with_free_steps
from op_cases import CASES, Case
from torch import Tensor
from torch.utils import _pytree as pytree
from wrong_tensors import EVERY_TENSOR, Within, check_dimensions, check_dtype, check_strides

from torch_dynemb._library.op_names import op_names, tagged_ops
from torch_dynemb.ops import OPTIMIZER_NAMES

pytestmark = pytest.mark.own_device

# A sum over a row, by one order on the CPU's lanes and another on a GPU's.
ROUNDED = ("bag_weight_grad", "pool_rows_weight_grad", "ragged_tile_weight_grad")
ROUNDED_OPTIMIZERS = (
    "rowwise_adagrad",
    "partial_rowwise_adam",
    "lamb",
    "partial_rowwise_lamb",
    "lars_sgd",
    "group_ftrl",
    "rowwise_rmsprop",
)

OP_CASES = [
    pytest.param(name, case, id=f"{name} {kind}".strip())
    for name, cases in CASES.items()
    if name not in tagged_ops("host")
    for kind, case in cases.items()
]


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def results_of(name: str, returned: Any, arguments: Sequence[Any]) -> list[Tensor]:
    """What an op has returned, and its arguments after the call."""
    schema = getattr(torch.ops.dynemb, name).default._schema
    changed = [
        with_free_steps(given) if argument.name == "scores" and isinstance(given, Tensor) else given
        for argument, given in zip(schema.arguments, arguments, strict=False)
    ]
    return tensors_of((returned, changed))


def is_rounded(name: str, arguments: Sequence[Any]) -> bool:
    if name in ("embedding_backward_", "apply_grad_"):
        return OPTIMIZER_NAMES[arguments[-1]] in ROUNDED_OPTIMIZERS
    return name in ROUNDED


def check_results(
    name: str, returned: Any, arguments: Sequence[Any], on_cuda: Any, cuda_arguments: Sequence[Any]
) -> None:
    expected = results_of(name, returned, arguments)
    pairs = list(zip(expected, results_of(name, on_cuda, cuda_arguments), strict=True))
    rounded = is_rounded(name, arguments)
    assert pairs
    for position, (on_cpu, given) in enumerate(pairs):
        if rounded and on_cpu.dtype == torch.float32:
            torch.testing.assert_close(given.cpu(), on_cpu, rtol=1e-5, atol=1e-6)
        else:
            assert same_bits(on_cpu, given.cpu()), (position, on_cpu, given)


@pytest.mark.parametrize(("name", "case"), OP_CASES)
def test_an_op_does_what_the_cpu_does(name: str, case: Case, seed: int) -> None:
    op = getattr(torch.ops.dynemb, name)
    arguments, emulated_arguments = case(), case()
    expected = op(*arguments)
    with EmulatedCuda() as cuda:
        given = op(*emulated_arguments)
    assert name in cuda.redirected
    check_results(name, expected, arguments, given, emulated_arguments)


def test_ops_of_the_host_have_no_cuda_kernel() -> None:
    """With the tag a kernel would be left out of the tests."""
    emulator.library()
    key = "CPU"  # of the emulated kernels
    emulated = {
        name
        for name in op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"dynemb_emulated::{name}", key)
    }
    assert emulated & tagged_ops("host", "store") == set()
    assert emulated


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "case"), OP_CASES)
def test_an_op_does_what_the_cpu_does_on_a_gpu(name: str, case: Case) -> None:
    with torch.device("cpu"):
        arguments, host_arguments = case(), case()

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().cuda().requires_grad_(leaf.requires_grad)

    gpu_arguments = pytree.tree_map(move, host_arguments)
    op = getattr(torch.ops.dynemb, name)
    expected = op(*arguments)
    given = op(*gpu_arguments)
    torch.cuda.synchronize()
    torch.ops.dynemb.raise_device_errors(torch.cuda.current_device())
    check_results(name, expected, arguments, given, gpu_arguments)


@pytest.mark.cuda
def test_a_checksum_of_what_is_on_a_gpu_is_refused() -> None:
    message = r"crc32c: data is on cuda:0, but crc32c sums bytes in host memory: copy to the CPU"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.dynemb.crc32c(torch.zeros(3, device="cuda:0"), 0)


@pytest.mark.cuda
def test_a_store_of_tables_on_a_gpu_is_refused() -> None:
    message = r"store_stats: tier_clock is on cuda:0, but store_stats stores rows of host memory"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.dynemb.store_stats(torch.zeros((2, 16), dtype=torch.int64, device="cuda:0"))


@EVERY_TENSOR
@pytest.mark.parametrize(
    "check",
    [check_dtype, check_strides, check_dimensions],
    ids=["dtype", "strides", "dimensions"],
)
def test_wrong_tensors_are_refused(
    check: Callable[[str, int, Within], None], name: str, position: int
) -> None:
    """What the host can see, with the CPU's messages, before anything is changed."""
    check(name, position, EmulatedCuda)
