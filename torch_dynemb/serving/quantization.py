"""Frozen modules made from modules that torch.ao.quantization passes to ``from_float``.

``torch.ao.quantization.convert``, and TorchRec's functions on top of it, put a ``qconfig`` on the
modules that they replace: observers with the dtypes of weights and outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_dynemb.nn.module_kinds import Choices
from torch_dynemb.serving.freeze import frozen_by
from torch_dynemb.serving.frozen_tables import FrozenTables
from torch_dynemb.serving.missing import CountedTables
from torch_dynemb.serving.row_formats import RowKind
from torch_dynemb.serving.updated_tables import UpdatedTables

_KINDS: dict[torch.dtype, RowKind | None] = {
    torch.float32: None,
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.qint8: "int8",
    torch.quint8: "int8",
    torch.quint4x2: "int4",
    torch.float8_e4m3fn: "fp8",
}
_OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def quantized_copy(owner: str, module: nn.Module) -> nn.Module:
    """Make a frozen copy of a module by its ``qconfig``.

    Args:
        owner: prefix of error messages.
        module: a module that :func:`torch_dynemb.freeze` knows, or a frozen one, with a
            ``qconfig``. Dtypes are those of its ``weight()`` and ``activation()``, and by table
            name those of its ``per_table_weight_dtype``, if it has one. It does not change.

    Returns:
        The copy, without the hooks of the module, which convert() registers.

    Raises:
        TypeError: its rows are updated while they serve, or lie in files or in Redis.
        ValueError: the module has no qconfig, or rows or outputs cannot have its dtypes; or as
            :func:`torch_dynemb.freeze` raises for ``rows``.
    """
    qconfig = getattr(module, "qconfig", None)
    if qconfig is None:
        raise ValueError(
            f"{owner}: {type(module).__name__} has no qconfig with the dtype of its rows: "
            "call TorchRec's quantize_inference_model, or torch_dynemb.freeze(model, rows=...)"
        )
    if any(isinstance(part, UpdatedTables) for part in module.modules()):
        raise TypeError(
            f"{owner}: the rows of {type(module).__name__} are updated while they serve: say how "
            "they are stored when the copy is made, torch_dynemb.serving.live(model, rows=...)"
        )
    if any(_is_elsewhere(part) for part in module.modules()):
        raise TypeError(
            f"{owner}: {type(module).__name__} has its rows in files or in Redis, where they stay "
            "as they are: quantize a copy that torch_dynemb.freeze makes without storage=, or give "
            "rows= to freeze beside an SSDStore, and to the DeltaLog that RedisRows follows"
        )
    output_dtype = qconfig.activation().dtype
    if output_dtype not in _OUTPUTS:
        raise ValueError(
            f"{owner}: the dtype of qconfig.activation is {output_dtype}, but outputs of "
            f"{type(module).__name__} are one of {[str(dtype) for dtype in _OUTPUTS]}"
        )
    shared: list[Tensor] = []
    if any(isinstance(part, FrozenTables) for part in module.modules()):
        shared = _weights(module)
        made: Any = _copied(module, shared)
    else:
        made = frozen_by(Choices("all"), module)
    for part in made.modules():
        if isinstance(part, FrozenTables):
            part.store_rows(_kinds(owner, part, qconfig))
    _unshare(made, shared)
    made.output_dtype = output_dtype
    return made  # type: ignore[no-any-return]


def _is_elsewhere(part: nn.Module) -> bool:
    return isinstance(part, CountedTables) and not isinstance(part, FrozenTables)


def _kinds(owner: str, tables: FrozenTables, qconfig: Any) -> Mapping[str, RowKind | None]:
    """Return the format of each table's rows."""
    by_name = getattr(qconfig, "per_table_weight_dtype", None) or {}
    of_all = qconfig.weight().dtype
    kinds = {}
    for name in tables.names:
        dtype = by_name.get(name, of_all)
        if dtype not in _KINDS:
            raise ValueError(
                f"{owner}: the weight dtype of table {name!r} is {dtype}, but rows of dynamic "
                f"tables are one of {[str(known) for known in _KINDS]}"
            )
        kinds[name] = _KINDS[dtype]
    return kinds


def _weights(module: nn.Module) -> list[Tensor]:
    tables = [part for part in module.modules() if isinstance(part, FrozenTables)]
    return [part.get_buffer(f"weights{s}") for part in tables for s in range(part.slabs)]


def _copied(module: nn.Module, shared: list[Tensor]) -> nn.Module:
    """Copy a frozen module, without its hooks and qconfig.

    Args:
        shared: tensors that are not copied.
    """
    made = copy.deepcopy(module, {id(of): of for of in shared})
    for hooks in _HOOKS:
        getattr(made, hooks).clear()
    for part in made.modules():
        if hasattr(part, "qconfig"):
            del part.qconfig
    return made


def _unshare(made: nn.Module, shared: list[Tensor]) -> None:
    """Copy the rows that already have the format."""
    known = {id(of) for of in shared}
    for part in made.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if id(buffer) in known:
                part.register_buffer(name, buffer.clone())


__all__ = ["quantized_copy"]
