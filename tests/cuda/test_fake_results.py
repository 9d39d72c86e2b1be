"""For a compiler, results of ops on a GPU lie where the arguments do; no GPU is needed for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import CASES
from op_cases.groups import Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from torch_dynemb._library.op_names import tagged_ops

pytestmark = pytest.mark.own_device

OF_HOST = {"reported_counts"}  # copies for the program


def devices_of_results(name: str, case: Case) -> set[str]:
    arguments = case()
    shapes = ShapeEnv(allow_dynamic_output_shape_ops=True)

    def on_gpu(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cuda:0")

    with FakeTensorMode(shape_env=shapes):
        results = getattr(torch.ops.dynemb, name)(*pytree.tree_map(on_gpu, arguments))
        return {str(of.device) for of in pytree.tree_leaves(results) if isinstance(of, Tensor)}


@pytest.mark.parametrize("name", sorted(CASES.keys() - tagged_ops("host", "store")))
def test_results_are_on_the_gpu(name: str) -> None:
    expected = {"cpu"} if name in OF_HOST else {"cuda:0"}
    for case in CASES[name].values():
        assert devices_of_results(name, case) <= expected
