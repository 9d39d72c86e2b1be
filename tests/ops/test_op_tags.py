"""Tags of ops, and the lists of ops and arguments by which calls without a kernel are checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from op_cases import schema

import torch_dynemb  # noqa: F401  # registers the ops
from torch_dynemb._library import arguments
from torch_dynemb._library.op_names import OpTag, op_names, op_tags, tagged_ops, takes_tensors

pytestmark = pytest.mark.cpu_only("names alone")


def has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"dynemb::{name}", key)


def test_tags_are_of_ops() -> None:
    tags = op_tags()
    assert set(tags.values()) == set(get_args(OpTag))
    assert set(tags) < set(op_names())
    assert len(torch.ops.dynemb.op_tags()) == 2 * len(tags)  # none has two


def test_ops_of_a_gpu_alone_have_no_kernel_here() -> None:
    runs_here = {name for name in op_names() if has_kernel(name, "CPU")}
    assert not runs_here & tagged_ops("gpu")
    assert runs_here >= {name for name in tagged_ops("store") if takes_tensors(name)}


def named_arguments() -> Iterator[tuple[str, str]]:
    """Every op and argument that a list of the checks names."""
    yield from arguments._OTHERWISE
    yield from arguments._IN_HOST_MEMORY
    yield from arguments._ANY_NUMBER
    yield from ((op, "feature_tables") for op in arguments._ONE_FEATURE)
    for op, groups in arguments._SAME_LENGTH.items():
        yield from ((op, name) for group in groups for name in group)


def test_checks_are_of_arguments_that_ops_have() -> None:
    has = {(op, argument.name) for op in op_names() for argument in schema(op).arguments}
    assert set(named_arguments()) <= has
    offsets = {op for op, name in has if name.endswith("offsets")}
    assert set(arguments._NEVER_EMPTY) <= offsets
    names = {name for _, name in has}
    for of_any_op in (
        arguments._TENSORS,
        arguments._IN_LISTS,
        arguments._LEAST,
        arguments._MAY_BE_EMPTY,
        arguments._FEATURE_NUMBERS,
        arguments._FEATURE_NUMBERS.values(),
    ):
        assert set(of_any_op) <= names


def test_traced_calls_refuse_what_kernels_refuse_for_gpus() -> None:
    """What an op of host memory has for CUDA tensors is a kernel that says so."""
    refusing = {name for name in tagged_ops("host") if has_kernel(name, "CUDA")}
    assert refusing
    assert refusing <= {op for op, _ in arguments._IN_HOST_MEMORY} <= tagged_ops("host")
