"""The ops that have cases, and schemas."""

from __future__ import annotations

import torch

from torch_dynemb._library.op_names import op_names, tagged_ops


def ops_with_cases() -> list[str]:
    """Names of the ops that the CPU has, too, and that are about their arguments alone.

    Tests of CUDA call those of the memory of a GPU, tests/storage those of a store, which must be
    open and know the very tensors.
    """
    return [name for name in op_names() if name not in tagged_ops("gpu", "store")]


def schema(name: str) -> torch.FunctionSchema:
    return getattr(torch.ops.dynemb, name).default._schema
