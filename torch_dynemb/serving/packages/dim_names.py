"""The user's names of the dynamic sizes of an exported program, which torch calls ``s77``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree


def dim_names(
    program: torch.export.ExportedProgram,
    forward: Callable[..., Any],
    inputs: tuple[Any, ...],
    dynamic_shapes: Any,
) -> dict[str, str]:
    """Return names of ``torch.export.Dim`` by torch's symbols.

    Args:
        program: as passed to ``torch.export.export``.
        forward: the function with the arguments that ``dynamic_shapes`` may name.
        inputs: of the export, positional ones.
        dynamic_shapes: as ``torch.export.export`` was given it.

    Returns:
        Symbol -> name; sizes without a name of their own, such as ``Dim.AUTO``, are left out.
    """
    if isinstance(dynamic_shapes, Mapping):
        order = list(inspect.signature(forward).parameters)
        dynamic_shapes = [dynamic_shapes.get(name) for name in order[: len(inputs)]]
    found: dict[str, str] = {}
    specs = list(_specs(inputs, dynamic_shapes))
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    leaves = [
        nodes[spec.arg.name].meta.get("val")
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.USER_INPUT
    ]
    for leaf, spec in zip(leaves, specs, strict=False):
        if not isinstance(leaf, Tensor):
            continue
        for size, name in zip(leaf.shape, _names(spec, leaf.dim()), strict=True):
            if name is None or not isinstance(size, torch.SymInt):
                continue
            symbols = list(size.node.expr.free_symbols)
            if len(symbols) == 1 and name not in found.values():
                found.setdefault(str(symbols[0]), name)
    return found


def _specs(value: Any, shapes: Any) -> Iterator[Any]:
    """Return the entry of ``dynamic_shapes`` for each leaf; None: none, or of an unknown form."""
    if pytree.tree_is_leaf(value):
        yield shapes
        return
    children = pytree.SUPPORTED_NODES[_node_type(value)].flatten_fn(value)[0]
    if isinstance(value, Mapping) and isinstance(shapes, Mapping):
        parts: list[Any] = [shapes.get(key) for key in value]
    elif isinstance(shapes, list | tuple) and len(shapes) == len(children):
        parts = list(shapes)
    else:
        parts = [None] * len(children)
    for child, part in zip(children, parts, strict=True):
        yield from _specs(child, part)


def _node_type(value: Any) -> Any:
    return pytree._get_node_type(value)


def _names(spec: Any, dims: int) -> list[str | None]:
    """Yield the name of each dimension; of one computed from another, that of the other."""
    if isinstance(spec, Mapping):
        sizes = [spec.get(dim) for dim in range(dims)]
    elif isinstance(spec, list | tuple) and len(spec) == dims:
        sizes = list(spec)
    else:
        sizes = [None] * dims
    return [getattr(getattr(size, "root", size), "__name__", None) for size in sizes]


__all__ = ["dim_names"]
