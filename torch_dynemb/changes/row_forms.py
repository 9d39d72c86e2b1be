"""Forms of the rows in a log that take fewer bytes than those of the table."""

from __future__ import annotations

from typing import Literal

import torch

from torch_dynemb import ops
from torch_dynemb.changes.payloads import LoggedPart
from torch_dynemb.ops.columns import RowFormat
from torch_dynemb.ops.quantized import row_bytes
from torch_dynemb.table.row_batch import RowBatch

LogRows = Literal["int8", "fp16"]
LOG_ROWS: tuple[LogRows, ...] = ("int8", "fp16")


def in_form(name: str, rows: RowBatch, form: LogRows | None) -> RowBatch:
    """Return rows in the form of a log.

    Args:
        name: name of their table.
        rows: rows of floats.
        form: the form; None: as they are.

    Raises:
        ValueError: a row has values that the form cannot hold.
    """
    if form is None:
        return rows
    if form == "fp16":
        stored = rows.rows.to(torch.float16)
        back = stored
    else:
        stored = ops.quantize_rows(rows.rows, RowFormat.INT8)
        back = ops.dequantize_rows(stored, RowFormat.INT8, rows.rows.shape[1])
    lost = rows.rows.isfinite().all(1) & ~back.isfinite().all(1)
    if bool(lost.any()):
        raise ValueError(
            f"DeltaLog: rows is {form!r}, but the row of id {int(rows.ids[lost][0])} of table "
            f"{name!r} has values beyond its range: find out why they are so large, or publish "
            "without rows="
        )
    return rows._replace(rows=stored)


def kind_of(logged: LoggedPart, form: str | None) -> tuple[torch.dtype, int]:
    """Return dtype and columns of the rows of a record.

    Args:
        logged: table in the batch.
        form: form of the rows; None: that of the table.

    Raises:
        ValueError: the table has rows of 8 bits, which have no other form.
    """
    columns = logged.part.columns
    if form is None:
        return logged.table.column_dtype, columns
    if logged.table.packed:
        raise ValueError(f"table {logged.name!r} of rows of 8 bits has rows of {form}")
    if form == "fp16":
        return torch.float16, columns
    return torch.uint8, row_bytes(RowFormat.INT8, columns)


def as_floats(logged: LoggedPart, rows: RowBatch) -> RowBatch:
    """Return rows in the dtype of their table.

    Args:
        logged: table in the batch.
        rows: rows in any form.
    """
    values, dtype = rows.rows, logged.table.column_dtype
    if values.dtype == torch.uint8:
        values = ops.dequantize_rows(values, RowFormat.INT8, logged.part.columns)
    return rows._replace(rows=values.to(dtype))


__all__ = ["LOG_ROWS", "LogRows", "as_floats", "in_form", "kind_of"]
