"""Names of the dynamic sizes of an exported program, which torch calls ``s77``."""

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
    """Return names for torch's symbols: of ``torch.export.Dim``, or places such as ``x.shape[0]``.

    Args:
        program: as passed to ``torch.export.export``.
        forward: the function with the arguments that ``dynamic_shapes`` may name.
        inputs: of the export, positional ones.
        dynamic_shapes: as ``torch.export.export`` was given it.

    Returns:
        Symbol -> name; that of a size without a name of its own, such as ``Dim.AUTO``, is the
        place of the first input with it.
    """
    if isinstance(dynamic_shapes, Mapping):
        order = list(inspect.signature(forward).parameters)
        dynamic_shapes = [dynamic_shapes.get(name) for name in order[: len(inputs)]]
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    leaves = [
        nodes[spec.arg.name]
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.USER_INPUT
    ]
    sizes: list[tuple[Any, str, str | None]] = []  # expression, place and name of each size
    for leaf, spec in zip(leaves, _specs(inputs, dynamic_shapes), strict=False):
        value = leaf.meta.get("val")
        if isinstance(value, Tensor):
            for dim, (size, name) in enumerate(
                zip(value.shape, _names(spec, value.dim()), strict=True)
            ):
                if isinstance(size, torch.SymInt):
                    sizes.append((size.node.expr, f"{leaf.name}.shape[{dim}]", name))
    found: dict[str, str] = {}
    for expression, _, name in sizes:
        symbols = list(expression.free_symbols)
        if len(symbols) == 1 and name is not None and name not in found.values():
            found.setdefault(str(symbols[0]), name)
    for expression, place, _ in sizes:
        if expression.is_Symbol:
            found.setdefault(str(expression), place)
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
