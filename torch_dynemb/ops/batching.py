"""Batching rules: what ``torch.vmap`` does with lookups.

Ops that read are called for each sample, as vmap calls ops without a rule; it cannot itself call
those that take lists of tensors. A lookup that trains is refused, since its ids have an order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_READS = (
    "embedding",
    "embedding_forward",
    "embedding_inference",
    "find",
    "find_and_read",
    "get_scores",
    "ids_concat",
    "pool_rows",
    "serve_lookup",
    "serve_rows",
)


def _rule_of(op: str) -> Callable[..., Any]:
    function = getattr(torch.ops.dynemb, op).default

    def each_sample(info: Any, in_dims: Any, *arguments: Any) -> Any:
        if info.batch_size == 0:
            raise RuntimeError(
                f"dynemb::{op}: torch.vmap got 0 samples, expected at least 1: leave the call out"
            )
        leaves, structure = pytree.tree_flatten(arguments)
        dims = pytree.tree_leaves(in_dims)
        samples = []
        for sample in range(info.batch_size):
            of_sample = [
                leaf if dim is None else leaf.select(dim, sample).contiguous()
                for leaf, dim in zip(leaves, dims, strict=True)
            ]
            samples.append(function(*pytree.tree_unflatten(of_sample, structure)))
        if isinstance(samples[0], Tensor):
            return torch.stack(samples), 0
        outputs = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
        return outputs, (0,) * len(outputs)

    return each_sample


def _refuse(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
    raise RuntimeError(
        "dynemb::find_or_insert_: torch.vmap over a lookup that trains would insert the ids of "
        "samples in no order: look up all of them in one call, which takes ids of any shape, or "
        "call eval() of the module first"
    )


for _op in _READS:
    torch.library.register_vmap(f"dynemb::{_op}", _rule_of(_op))
torch.library.register_vmap("dynemb::find_or_insert_", _refuse)
