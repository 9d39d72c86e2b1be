"""``torch.library.opcheck`` for every case of every op; AOT autograd traces one case of each."""

from __future__ import annotations

import functools

import pytest
import torch
from execution import simd
from op_cases import CASES, REGISTERED, Case, ops_with_cases, serving, tiers
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("compilers and their view of ops")

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor")
AOT = "test_aot_dispatch_dynamic"

# AOT compares the results of two calls: other processes take memory in between, each call has a
# number of its own, and it compares no text.
NOT_COMPARABLE = ("available_memory", "bind_lookup", "op_tags", "optimizer_names")

# AOT compares gradients by torch.autograd.grad: the anchor of a lookup has 0 in eager mode, and
# None in a trace, which is of a backward that trains (nn/test_compile.py compares such).
ANCHORED = ("embedding",)

EVERY_CASE = [
    pytest.param(name, case, id=f"{name} {label}".strip())
    for name, cases in CASES.items()
    for label, case in cases.items()
]


def test_every_op_has_a_case() -> None:
    assert sorted({*CASES, *REGISTERED}) == ops_with_cases()
    assert all(CASES.values())


@functools.cache
def traced_case(name: str) -> Case | None:
    """Return the case that AOT autograd traces: the first with a gradient, else the first."""
    if name in NOT_COMPARABLE:
        return None
    cases = CASES[name]
    first = next(iter(cases.values()))
    if name in ANCHORED:
        return cases["no gradient"]
    return next((case for case in cases.values() if has_gradient(case())), first)


def has_gradient(arguments: object) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(arguments))


@pytest.mark.parametrize(("name", "case"), EVERY_CASE)
def test_opcheck(name: str, case: Case) -> None:
    op = getattr(torch.ops.dynemb, name).default
    utilities = [*UTILITIES, *[AOT] * (case is traced_case(name))]
    with simd(ops.simd_level()):  # set_simd_level is among the ops
        result = torch.library.opcheck(op, case(), test_utils=utilities)
    assert result == dict.fromkeys(utilities, "SUCCESS")


@pytest.mark.parametrize("name", REGISTERED)
def test_tensors_of_no_open_store_are_refused(name: str) -> None:
    """Such as the copies with which other ops are checked."""
    arguments = REGISTERED[name]()
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(RuntimeError, match=rf"{name}: .*no store"):
        getattr(torch.ops.dynemb, name)(*arguments)
    assert all(map(torch.equal, tensors, before))


CPU_TENSORS = {"places", "slots", "free_slots", "tier_clock", "weights", "generations", "state"}


@pytest.mark.parametrize("key", ["CPU", "CUDA"])
@pytest.mark.parametrize("name", tiers.CASES)
def test_caches_are_refused_where_they_are_not_on_the_cpu(name: str, key: str) -> None:
    """By the kernel for CUDA tensors, too, which a build without CUDA kernels has."""
    op = getattr(torch.ops.dynemb, name).default
    arguments = next(iter(tiers.CASES[name].values()))()
    names = [argument.name for argument in op._schema.arguments]
    for position, argument in enumerate(names):
        if argument not in CPU_TENSORS or (argument == "slots" and "places" not in names):
            continue
        elsewhere = tree_map_only(Tensor, lambda t: t.to("meta"), arguments[position])
        changed = (*arguments[:position], elsewhere, *arguments[position + 1 :])
        message = rf"{name}: {argument} is on another device, but {name} moves rows in host memory"
        with pytest.raises(RuntimeError, match=message):
            op._op_dk(getattr(torch._C.DispatchKey, key), *changed)


@pytest.mark.parametrize("name", tiers.CASES)
def test_traced_calls_refuse_them_with_the_same_words(name: str) -> None:
    given = next(iter(tiers.CASES[name].values()))()
    with FakeTensorMode() as mode:
        arguments = tree_map_only(Tensor, lambda t: mode.from_tensor(t).to("cuda:0"), given)
        message = rf"{name}: \w+\[0\] is on cuda:0, but {name} moves rows in host memory: tables w"
        with pytest.raises(RuntimeError, match=message):
            getattr(torch.ops.dynemb, name)(*arguments)


@pytest.mark.parametrize("name", serving.CASES)
@pytest.mark.parametrize("argument", ["buckets", "tables", "weights"])
def test_tables_are_refused_where_they_are_not_on_the_cpu(name: str, argument: str) -> None:
    """Traced, and by the kernel for CUDA tensors, which a build without CUDA kernels has, too."""
    op = getattr(torch.ops.dynemb, name).default
    given = next(iter(serving.CASES[name].values()))()
    position = [of.name for of in op._schema.arguments].index(argument)
    elsewhere = tree_map_only(Tensor, lambda t: t.to("meta"), given[position])
    changed = (*given[:position], elsewhere, *given[position + 1 :])
    works = rf"but {name} works on host memory: live tables are on the CPU; a GPU serves frozen"
    message = rf"{name}: {argument} is on another device, {works}"
    with pytest.raises(RuntimeError, match=message):
        op._op_dk(torch._C.DispatchKey.CUDA, *changed)
    with FakeTensorMode() as mode:
        arguments = tree_map_only(Tensor, lambda t: mode.from_tensor(t).to("cuda:0"), given)
        words = rf"{name}: \w+(\[0\])? is on cuda:0, {works}"
        with pytest.raises(RuntimeError, match=words):
            op(*arguments)
