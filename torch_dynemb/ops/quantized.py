"""Rows of 8 or 4 bits a value, for lookups without training.

A quantized row is uint8: the codes of its columns, then its scale. Rows of int8 and int4 have the
bytes of FBGEMM's FloatToFused8BitRowwiseQuantized and FloatToFusedNBitRowwiseQuantizedSBHalf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.columns import RowFormat


def row_bytes(row_format: int, dim: int) -> int:
    """Return the bytes of a quantized row.

    Args:
        row_format: a ``columns.RowFormat`` other than FLOATS.
        dim: columns, 1 or more; an even number for INT4.

    Returns:
        int8: dim + 8, for scale and bias in float32; int4: dim / 2 + 4, in float16; fp8: dim + 4,
        for a scale in float32.

    Raises:
        ValueError: row_format or dim is invalid.

    Example:
        >>> [row_bytes(form, 16) for form in (RowFormat.INT8, RowFormat.INT4, RowFormat.FLOAT8)]
        [24, 12, 20]
    """
    if row_format not in (RowFormat.INT8, RowFormat.INT4, RowFormat.FLOAT8):
        raise ValueError(
            f"row_bytes: format is {row_format}, expected 1 (int8), 2 (int4) or 3 (fp8)"
        )
    if dim < 1 or (row_format == RowFormat.INT4 and dim % 2 != 0):
        raise ValueError(
            f"row_bytes: dim is {dim}, expected 1 or more, and an even number for int4"
        )
    codes = dim // 2 if row_format == RowFormat.INT4 else dim
    return codes + (8 if row_format == RowFormat.INT8 else 4)


@raises_typed_errors
def quantize_rows(rows: Tensor, row_format: int) -> Tensor:
    """Quantize rows of floats, with a scale for each row.

    int8 and int4 codes are steps of ``scale`` above ``bias``, the least value of the row. fp8 codes
    are floats of 4 bits of exponent and 3 of mantissa (E4M3); the largest of a row is 448 times its
    scale. Codes are rounded to nearest even. A row with NaN or infinity has NaN as its scale and
    reads as NaN in all columns. So does a row beyond the scales of the format (int4: beyond 65504,
    or a range beyond 982,560).

    Args:
        rows: float32, float16 or bfloat16 [N, dim]; dim is an even number for INT4.
        row_format: a ``columns.RowFormat`` other than FLOATS.

    Returns:
        uint8 [N, bytes], see :func:`row_bytes`.

    Raises:
        RuntimeError: dtype or shape of ``rows``, or ``row_format``.

    Example:
        >>> packed = quantize_rows(torch.tensor([[0.0, 1.0, 2.0, 255.0]]), RowFormat.INT8)
        >>> packed[0, :4]
        tensor([  0,   1,   2, 255], dtype=torch.uint8)
    """
    packed: Tensor = torch.ops.dynemb.quantize_rows(rows, int(row_format))
    return packed


@raises_typed_errors
def dequantize_rows(packed: Tensor, row_format: int, dim: int) -> Tensor:
    """Return the values of quantized rows: the bits that lookups sum.

    Args:
        packed: uint8 [N, bytes], made by :func:`quantize_rows`.
        row_format: the format of ``packed``.
        dim: columns of a row.

    Returns:
        float32 [N, dim]: ``scale * code + bias``, of fp8 ``scale * code``, each step rounded.

    Raises:
        RuntimeError: dtype or shape of ``packed``, ``row_format``, or a dim that does not fit the
            bytes of a row.

    Example:
        >>> packed = quantize_rows(torch.tensor([[0.5, -3.0]]), RowFormat.FLOAT8)
        >>> dequantize_rows(packed, RowFormat.FLOAT8, 2)
        tensor([[ 0.4821, -3.0000]])
    """
    rows: Tensor = torch.ops.dynemb.dequantize_rows(packed, int(row_format), dim)
    return rows


@register_fake("quantize_rows")
def _quantize_rows_fake(rows: Tensor, row_format: int) -> Tensor:
    bytes_of_row = row_bytes(row_format, int(rows.shape[1]))
    return rows.new_empty((rows.shape[0], bytes_of_row), dtype=torch.uint8)


@register_fake("dequantize_rows")
def _dequantize_rows_fake(packed: Tensor, row_format: int, dim: int) -> Tensor:
    return packed.new_empty((packed.shape[0], dim), dtype=torch.float32)
