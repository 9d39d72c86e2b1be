"""Groups with rows of less than float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from group_calls import bag_lookup, flat_call
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.optim import OptimizerConfig

SMALL = [torch.bfloat16, torch.float16]
small_dtypes = pytest.mark.parametrize("dtype", SMALL, ids=["bfloat16", "float16"])
DIM = 21  # vectors of 16, and a rest


def make_group(
    optimizer: OptimizerConfig | None,
    dtype: torch.dtype,
    *,
    dim: int = DIM,
    max_rows: int = 1000,
    seed: int = 3,
    **arguments: Any,
) -> td.TableGroup:
    table = td.TableConfig("t", dim, initializer=td.Uniform(-1.0, 1.0), dtype=dtype)
    return td.TableGroup([table], optimizer=optimizer, max_rows=max_rows, seed=seed, **arguments)


def step(group: td.TableGroup, ids: Tensor, gradient: Tensor) -> None:
    bag_lookup(group, flat_call(group, 0, ids)).backward(gradient)
