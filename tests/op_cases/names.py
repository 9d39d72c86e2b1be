"""Names and schemas of the ops of ``torch.ops.dynemb``."""

from __future__ import annotations

import torch

# They manage a GPU's memory and have no CPU kernel; tests of CUDA call them.
GPU_MEMORY_OPS = {
    "available_cuda_memory",
    "bind_group",
    "cuda_architectures",
    "end_step",
    "raise_device_errors",
    "release_group",
    "reserve_cuda",
}
# They work on a store that has been opened with the very tensors, not with copies of them, and on
# its files; tests/storage calls them.
STORE_OPS = {
    "store_check",
    "store_close",
    "store_drain",
    "store_erase",
    "store_hold",
    "store_keep",
    "store_load",
    "store_open",
    "store_read",
    "store_read_held",
    "store_release",
    "store_stats",
    "store_sync",
    "store_write",
}


def all_op_names() -> list[str]:
    """Names of all ops of the library, without namespace."""
    prefix = "dynemb::"
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def op_names() -> list[str]:
    """Names of the ops that the CPU has, too, and that are about their arguments alone."""
    return [name for name in all_op_names() if name not in GPU_MEMORY_OPS | STORE_OPS]


def schema(name: str) -> torch.FunctionSchema:
    return getattr(torch.ops.dynemb, name).default._schema
