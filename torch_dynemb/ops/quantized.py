"""Rows of 8 or 4 bits a value, and lookups that read them.

A quantized row is uint8: the codes of its columns, then its scale. Rows of int8 and int4 have the
bytes that FBGEMM's FloatToFused8BitRowwiseQuantized and FloatToFusedNBitRowwiseQuantizedSBHalf
make.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.columns import Pooling, RowFormat
from torch_dynemb.ops.lookup import check_weights, lookup_output
from torch_dynemb.ops.tensors import LookupBatch, RowTensors


def row_bytes(row_format: int, dim: int) -> int:
    """Bytes of a quantized row.

    Args:
        row_format: a ``columns.RowFormat`` other than FLOATS.
        dim: columns, 1 or more; an even number for INT4.

    Returns:
        int8: dim + 8, for scale and bias in float32; int4: dim / 2 + 4, in float16; fp8: dim + 4,
        for a scale in float32.

    Raises:
        ValueError: no such format, or no such dim.

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
    """Rows of floats as codes with a scale for each row.

    int8 and int4 codes are steps of ``scale`` above ``bias``, the least value of the row; fp8 codes
    are floats of 4 bits of exponent and 3 of mantissa (E4M3), the largest of a row 448 times its
    scale. Codes are rounded to nearest even. A row with NaN or infinity, or with values that no
    scale of the format reaches (int4: beyond 65504, or a range beyond 982,560), has NaN as its
    scale: it reads as NaN in all columns.

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
    """The values of quantized rows: the bits that lookups take sums of.

    Args:
        packed: uint8 [N, bytes], of :func:`quantize_rows`.
        row_format: that it was given.
        dim: columns of a row.

    Returns:
        float32 [N, dim]: ``scale * code + bias``, of fp8 ``scale * code``, each step rounded.

    Raises:
        RuntimeError: dtype or shape of ``packed``, ``row_format``, or a dim whose rows have another
            number of bytes.

    Example:
        >>> packed = quantize_rows(torch.tensor([[0.5, -3.0]]), RowFormat.FLOAT8)
        >>> dequantize_rows(packed, RowFormat.FLOAT8, 2)
        tensor([[ 0.4821, -3.0000]])
    """
    rows: Tensor = torch.ops.dynemb.dequantize_rows(packed, int(row_format), dim)
    return rows


@raises_typed_errors
def quantized_embedding(
    rows: RowTensors, batch: LookupBatch, handles: Tensor, *, formats: Sequence[int]
) -> Tensor:
    """:func:`torch_dynemb.ops.embedding_inference` of slabs that may be quantized.

    The bits are those of the rows that :func:`dequantize_rows` gives, and of their sums. Ids that
    have no row read their initial values in float32, as they do where rows are float32. Calls
    ``torch.ops.dynemb.quantized_embedding_bag``, or ``quantized_embedding`` if ``batch`` asks for
    rows.

    Args:
        rows: of the tables; ``weights`` of quantized slabs are uint8 [rows, bytes].
        batch: what is asked for.
        handles: int64 [N], of the ids.
        formats: a ``columns.RowFormat`` for each slab.

    Returns:
        float32 [B, sum of feature_dims], 0 for an empty bag; or without pooling [N, dim], 0 for
        padding ids.

    Raises:
        TypeError, ValueError: dtype, shape or device of per_sample_weights.
        RuntimeError: another argument does not fit the rows.
    """
    ids, offsets, weights, tables, dims, pooling = batch
    output: Tensor
    if pooling == Pooling.NONE:
        output = torch.ops.dynemb.quantized_embedding(
            *rows.read, ids, handles, offsets, tables, dims[0], list(formats)
        )
    else:
        check_weights("quantized_embedding_bag", batch)
        output = torch.ops.dynemb.quantized_embedding_bag(
            *rows.read, ids, handles, offsets, weights, tables, dims, list(formats), pooling
        )
    return output


@register_fake("quantize_rows")
def _quantize_rows_fake(rows: Tensor, row_format: int) -> Tensor:
    bytes_of_row = row_bytes(row_format, int(rows.shape[1]))
    return rows.new_empty((rows.shape[0], bytes_of_row), dtype=torch.uint8)


@register_fake("dequantize_rows")
def _dequantize_rows_fake(packed: Tensor, row_format: int, dim: int) -> Tensor:
    return packed.new_empty((packed.shape[0], dim), dtype=torch.float32)


@register_fake("quantized_embedding_bag")
def _quantized_embedding_bag_fake(
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    meta: Tensor,
    init_data: Tensor,
    ids: Tensor,
    handles: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    formats: Sequence[int],
    pooling: int,
) -> Tensor:
    batch = (offsets.shape[0] - 1) // len(feature_tables)
    return lookup_output(ids, batch, sum(feature_dims))


@register_fake("quantized_embedding")
def _quantized_embedding_fake(
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    meta: Tensor,
    init_data: Tensor,
    ids: Tensor,
    handles: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    dim: int,
    formats: Sequence[int],
) -> Tensor:
    return lookup_output(ids, ids.shape[0], dim)
