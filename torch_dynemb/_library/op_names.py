"""Names of the ops of ``torch.ops.dynemb``, and the tags that ``csrc/ops.cpp`` gives them."""

from __future__ import annotations

from typing import Literal

import torch

OpTag = Literal["host", "store", "gpu"]

_PREFIX = "dynemb::"


def op_names() -> list[str]:
    """Return the names of all ops, without namespace, sorted."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))


def op_tags() -> dict[str, OpTag]:
    """Return the tags of ops that lack a kernel for some device, by name.

    Returns:
        ``"host"`` of ops on host memory, ``"store"`` of those on the tensors of an open store, and
        ``"gpu"`` of those on the memory of a GPU.
    """
    flat = torch.ops.dynemb.op_tags()
    return dict(zip(flat[::2], flat[1::2], strict=True))


def tagged_ops(*tags: OpTag) -> set[str]:
    """Return the names of ops that have one of these tags."""
    return {name for name, tag in op_tags().items() if tag in tags}


def takes_tensors(op: str) -> bool:
    """Return whether an op has tensor arguments; without them, no device selects a kernel."""
    schema = getattr(torch.ops.dynemb, op).default._schema
    return any("Tensor" in str(argument.type) for argument in schema.arguments)


__all__ = ["OpTag", "op_names", "op_tags", "tagged_ops", "takes_tensors"]
