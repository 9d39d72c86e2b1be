"""Registration of RaggedTensor with torch's pytrees, torch.export and torch.load."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_dynemb.recis.ragged.places import Side
from torch_dynemb.recis.ragged.tensor import RaggedTensor

_Context = tuple[int, tuple[int, ...] | None, bool, Side]


def _flatten(ragged: RaggedTensor) -> tuple[list[Any], _Context]:
    unpadded = ragged._unpadded
    children = [ragged._values, ragged._weight, *ragged._offsets, *(unpadded or [])]
    context = (len(ragged._offsets), ragged._dense_shape, unpadded is not None, ragged._pad_side)
    return children, context


def _unflatten(children: Any, context: _Context) -> RaggedTensor:
    depth, dense_shape, padded, side = context
    values, weight, *offsets = children
    ragged = RaggedTensor._of_parts(values, offsets[:depth], weight, dense_shape)
    if padded:
        ragged._unpadded, ragged._pad_side = list(offsets[depth:]), side
    return ragged


def _flatten_with_keys(
    ragged: RaggedTensor,
) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Context]:
    children, context = _flatten(ragged)
    names = ["values", "weight", *(f"offsets_{d}" for d in range(len(children) - 2))]
    return [(pytree.GetAttrKey(n), c) for n, c in zip(names, children, strict=True)], context


def _from_dumpable(context: Any) -> _Context:
    depth, dense_shape, padded, side = context
    return depth, None if dense_shape is None else tuple(dense_shape), padded, side


def register_ragged_tensor() -> None:
    """Register RaggedTensor with torch, once in a process."""
    pytree.register_pytree_node(
        RaggedTensor,
        _flatten,
        _unflatten,
        serialized_type_name="torch_dynemb.recis.RaggedTensor",
        to_dumpable_context=list,
        from_dumpable_context=_from_dumpable,
        flatten_with_keys_fn=_flatten_with_keys,
    )
    # torch.export saves example inputs, and torch.load refuses unregistered classes
    torch.serialization.add_safe_globals([RaggedTensor])


__all__ = ["register_ragged_tensor"]
