"""``torch.library.opcheck``, all four utilities, for every op."""

from __future__ import annotations

import pytest
import torch
from execution import simd
from op_cases import CASES, Case, op_names

from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("compilers and what they are told of ops")

UTILITIES = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


# It compares the results of two calls, and other processes take memory in between.
NOT_COMPARABLE = {"available_memory": "test_aot_dispatch_dynamic"}

EVERY_CASE = [
    pytest.param(name, case, id=f"{name} {label}".strip())
    for name, cases in CASES.items()
    for label, case in cases.items()
]


def test_every_op_has_a_case() -> None:
    assert sorted(CASES) == op_names()
    assert all(CASES.values())


@pytest.mark.parametrize(("name", "case"), EVERY_CASE)
def test_opcheck(name: str, case: Case) -> None:
    op = getattr(torch.ops.dynemb, name).default
    utilities = [utility for utility in UTILITIES if utility != NOT_COMPARABLE.get(name)]
    with simd(ops.simd_level()):  # set_simd_level is among the ops
        result = torch.library.opcheck(op, case(), test_utils=utilities)
    assert result == dict.fromkeys(utilities, "SUCCESS")
