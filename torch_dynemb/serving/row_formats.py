"""Formats of rows of frozen tables that differ from those of the copied tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import RowFormat
from torch_dynemb.ops.quantized import row_bytes

RowKind = Literal["int8", "int4", "fp8", "fp16", "bf16"]
ROW_KINDS: tuple[RowKind, ...] = ("int8", "int4", "fp8", "fp16", "bf16")
_FORMATS = {"int8": RowFormat.INT8, "int4": RowFormat.INT4, "fp8": RowFormat.FLOAT8}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ROWS_AT_ONCE = 1 << 16  # compared with the originals


class FormattedRows(NamedTuple):
    """Rows of a slab in another format.

    Attributes:
        weights: float16 or bfloat16 [rows, dim]; quantized: uint8 [rows, bytes].
        row_format: format of the weights.
        lost: bool [rows]: whether a row has NaN or infinity, or has it in the new format.
    """

    weights: Tensor
    row_format: RowFormat
    lost: Tensor


def check_rows(owner: str, rows: object) -> None:
    """Raise ValueError unless ``rows`` is a format of rows, or None.

    Args:
        owner: prefix of error messages.
        rows: as in :func:`torch_dynemb.freeze`.
    """
    if rows is not None and rows not in ROW_KINDS:
        raise ValueError(f"{owner}: rows is {rows!r}, expected None or one of {ROW_KINDS}")


def is_stored_so(weights: Tensor, row_format: int, rows: RowKind | None) -> bool:
    """Return whether the rows of a slab already have a format.

    Args:
        weights: [rows, dim]; quantized: [rows, bytes].
        row_format: a ``columns.RowFormat``.
        rows: the format; None: any floats.
    """
    if rows is None or rows in _DTYPES:
        of_floats = row_format == RowFormat.FLOATS
        return of_floats and (rows is None or weights.dtype == _DTYPES[rows])
    return row_format == _FORMATS[rows]


def stored_rows(weights: Tensor, rows: RowKind) -> FormattedRows:
    """Return the rows of a slab in another format.

    Args:
        weights: float32, float16 or bfloat16 [rows, dim].
        rows: the format.

    Returns:
        See :class:`FormattedRows`.

    Raises:
        ValueError: the format cannot hold this number of columns.
    """
    count, dim = weights.shape
    lost = torch.zeros(count, dtype=torch.bool, device=weights.device)
    back: Callable[[Tensor], Tensor]
    if rows in _DTYPES:
        row_format, stored = RowFormat.FLOATS, weights.to(_DTYPES[rows])
        back = _as_they_are
    else:
        row_format = _FORMATS[rows]
        if row_format == RowFormat.INT4 and dim % 2 != 0:
            raise ValueError(
                f"rows of int4 have an even number of columns, and dim is {dim}: take 'int8' or "
                "'fp8'"
            )
        stored = ops.quantize_rows(weights, row_format)

        def back(part: Tensor) -> Tensor:
            return ops.dequantize_rows(part, row_format, dim)

    for begin in range(0, count, _ROWS_AT_ONCE):
        part = slice(begin, begin + _ROWS_AT_ONCE)
        lost[part] = ~back(stored[part]).isfinite().all(1)
    return FormattedRows(stored, row_format, lost)


def _as_they_are(part: Tensor) -> Tensor:
    return part


def has_columns(weights: Tensor, row_format: int, dim: int) -> bool:
    """Return whether the rows of a slab have a number of columns.

    Args:
        weights: [rows, dim]; quantized: [rows, bytes].
        row_format: a ``columns.RowFormat``.
        dim: of a table, 1 or more.
    """
    if row_format == RowFormat.FLOATS:
        return int(weights.shape[1]) == dim
    whole = dim >= 1 and not (row_format == RowFormat.INT4 and dim % 2 != 0)
    return whole and int(weights.shape[1]) == row_bytes(row_format, dim)


__all__ = [
    "ROW_KINDS",
    "FormattedRows",
    "RowKind",
    "check_rows",
    "has_columns",
    "is_stored_so",
    "stored_rows",
]
