"""Payloads of records: tensors in the safetensors format, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.changes.batch import TABLES, Pieces, as_tensor
from torch_dynemb.files.tensor_file import (
    TensorShape,
    header_bytes,
    header_of,
    raw,
    sections_of,
)
from torch_dynemb.ops.columns import RowFormat
from torch_dynemb.ops.quantized import row_bytes
from torch_dynemb.parts.saved_checks import check_table
from torch_dynemb.parts.saved_tables import SavedPart, SavedTable, table_of
from torch_dynemb.rows.tensor_names import ID, WEIGHT, score_entry, state_entry
from torch_dynemb.table.row_batch import RowBatch

_MOST_JSON_BYTES = 16 << 20
_STATE, _SCORE = state_entry(""), score_entry("")
LogRows = Literal["int8", "fp16"]
LOG_ROWS: tuple[LogRows, ...] = ("int8", "fp16")


def weight_entry(form: str | None) -> str:
    """Return the name of the rows in a batch: those of the table, or in a form of a log."""
    return WEIGHT if form is None else f"{WEIGHT}.{form}"


class LoggedPart(NamedTuple):
    """Description of a part of a table in a batch.

    Attributes:
        name: name of the whole table, as in a checkpoint.
        table: as in the manifest of a checkpoint, with only this part, without files.
    """

    name: str
    table: SavedTable

    @property
    def part(self) -> SavedPart:
        """The part."""
        return self.table.parts[0]


def of_tensors(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Encode tensors as a safetensors file, in pieces.

    Args:
        tensors: tensors by name, contiguous, on the CPU.

    Raises:
        TypeError: the format lacks a dtype.
    """
    return [as_tensor(_header_of(tensors)), *tensors.values()]


def _header_of(tensors: Mapping[str, Tensor], rows: int | None = None) -> bytes:
    """Return the header of a payload: of these tensors, or of such tensors with other rows."""
    shapes = []
    for name, tensor in tensors.items():
        count = tensor.shape[:1] if rows is None else (rows,)
        shapes.append(TensorShape(name, tensor.dtype, (*count, *tensor.shape[1:])))
    header = header_of(shapes, alignment=8)
    check_size(len(header))
    return header


def payload_bytes(like: Mapping[str, Tensor], rows: int) -> int:
    """Return the size of a payload with this number of rows.

    Args:
        like: tensors with any number of rows.
        rows: number of rows.
    """
    row_bytes = sum(t.shape[1:].numel() * t.element_size() for t in like.values())
    return len(_header_of(like, rows)) + row_bytes * rows


def tensors_of_rows(rows: RowBatch, form: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a record of rows, by name.

    Args:
        rows: rows of a table.
        form: form of the rows; None: that of the table.
    """
    tensors = {ID: rows.ids, weight_entry(form): rows.rows}
    tensors |= {state_entry(name): values for name, values in rows.state.items()}
    return tensors | {score_entry(name): values for name, values in rows.scores.items()}


def rows_of(payload: Tensor, forms: Sequence[str] = ()) -> tuple[RowBatch, str | None]:
    """Decode a record of rows, as views.

    Args:
        payload: uint8 [n], of a record of rows.
        forms: forms that the rows may have, beside that of the table.

    Returns:
        The rows, and their form; None: that of the table.

    Raises:
        KeyError, ValueError: it is not such a payload.
    """
    tensors = tensors_of(payload)
    form = next((of for of in forms if weight_entry(of) in tensors), None)
    state = {
        name.removeprefix(_STATE): of for name, of in tensors.items() if name.startswith(_STATE)
    }
    scores = {
        name.removeprefix(_SCORE): of for name, of in tensors.items() if name.startswith(_SCORE)
    }
    return RowBatch(tensors[ID], tensors[weight_entry(form)], state, scores), form


def tensors_of(payload: Tensor) -> dict[str, Tensor]:
    """Decode the tensors in a payload, as views.

    Args:
        payload: uint8 [n], result of :func:`of_tensors`.

    Raises:
        ValueError: it is not such a payload.
    """
    length = header_bytes(bytes(raw(payload[:8])))
    check_size(length)
    sections = sections_of(bytes(raw(payload[8 : 8 + length])), 8 + length, payload.numel())
    if sum(section.bytes for section in sections.values()) > payload.numel():
        raise ValueError("its tensors overlap")
    result = {}
    for name, section in sections.items():
        values = payload[section.begin : section.begin + section.bytes]
        if section.dtype.itemsize > 1 and values.data_ptr() % section.dtype.itemsize != 0:
            values = values.clone()
        result[name] = values.view(section.dtype).view(section.shape)
    return result


def of_tables(tables: Sequence[LoggedPart]) -> Pieces:
    """Make a record that describes tables, as JSON.

    Args:
        tables: tables in the order of their numbers in the batch.
    """
    entries = [{"name": of.name, **asdict(of.table)} for of in tables]
    text = json.dumps(entries, separators=(",", ":"), allow_nan=False).encode()
    check_size(len(text))
    return Pieces.of(TABLES, 0, [as_tensor(text)])


def check_size(size: int) -> None:
    """Raise ValueError if JSON exceeds the limit of readers, which fits ten thousand tables.

    Args:
        size: bytes of JSON.
    """
    if size > _MOST_JSON_BYTES:
        raise ValueError(
            f"delta log: {size} bytes describe tables, tensors or state, but {_MOST_JSON_BYTES} "
            "are the most: publish fewer tables and dense tensors in one log, and give long lists "
            "in state= as tensors"
        )


def tables_of(payload: Tensor) -> list[LoggedPart]:
    """Decode the descriptions of tables.

    Args:
        payload: uint8 [n], of the record that describes them.

    Raises:
        ValueError: it is not such a payload.
    """
    check_size(payload.numel())
    try:
        entries: list[dict[str, Any]] = json.loads(bytes(raw(payload)))
        tables = [LoggedPart(entry.pop("name"), table_of(entry)) for entry in entries]
        for name, table in tables:
            check_table(f"table {name!r}", table, None)
            if not isinstance(name, str) or len(table.parts) != 1:
                raise ValueError(f"table {name!r} has {len(table.parts)} parts, expected one")
        return tables
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"its tables cannot be read: {error!r}") from error


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


__all__ = [
    "LOG_ROWS",
    "LogRows",
    "LoggedPart",
    "as_floats",
    "check_size",
    "in_form",
    "kind_of",
    "of_tables",
    "of_tensors",
    "payload_bytes",
    "rows_of",
    "tables_of",
    "tensors_of",
    "tensors_of_rows",
]
