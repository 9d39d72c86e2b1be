"""Payloads of records: tensors in the safetensors format, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from torch_dynemb.checkpoint.delta_log.batch import as_tensor
from torch_dynemb.checkpoint.files.tensor_file import (
    TensorShape,
    header_bytes,
    header_of,
    raw,
    sections_of,
)


@dataclass(frozen=True)
class LoggedTable:
    """A part of a table, as a batch describes it.

    Attributes:
        name: of the whole table, as in a checkpoint.
        embedding_dim: columns of the whole table.
        first_column: of this part.
        columns: of this part.
        dtype: of its rows, as a checkpoint names it.
        optimizer: name of what trains its rows; None: its state is not in the log.
        optimizer_steps: of the table; 0 where its state is not in the log.
    """

    name: str
    embedding_dim: int
    first_column: int
    columns: int
    dtype: str
    optimizer: str | None
    optimizer_steps: int


def of_tensors(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Tensors as a safetensors file, in pieces.

    Args:
        tensors: by name, contiguous, on the CPU.

    Raises:
        TypeError: a dtype that the format does not have.
    """
    shapes = [TensorShape(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    header = header_of(shapes, alignment=8)
    return [as_tensor(header), *tensors.values()]


def tensors_of(payload: Tensor) -> dict[str, Tensor]:
    """Views of the tensors in a payload.

    Args:
        payload: uint8 [n], what :func:`of_tensors` gives.

    Raises:
        ValueError: it is no such payload.
    """
    length = header_bytes(bytes(raw(payload[:8])))
    sections = sections_of(bytes(raw(payload[8 : 8 + length])), 8 + length, payload.numel())
    result = {}
    for name, section in sections.items():
        values = payload[section.begin : section.begin + section.bytes]
        if section.dtype.itemsize > 1 and values.data_ptr() % section.dtype.itemsize != 0:
            values = values.clone()
        result[name] = values.view(section.dtype).view(section.shape)
    return result


def of_tables(tables: list[LoggedTable]) -> list[Tensor]:
    """Descriptions of tables as JSON, in pieces."""
    text = json.dumps([asdict(table) for table in tables], separators=(",", ":")).encode()
    return [as_tensor(text)]


def tables_of_payload(payload: Tensor) -> list[LoggedTable]:
    """Descriptions of tables.

    Args:
        payload: uint8 [n], what :func:`of_tables` gives.

    Raises:
        ValueError: it is no such payload.
    """
    try:
        entries: list[dict[str, Any]] = json.loads(bytes(raw(payload)))
        return [LoggedTable(**entry) for entry in entries]
    except (TypeError, ValueError) as error:
        raise ValueError(f"its tables cannot be read: {error!r}") from error


__all__ = [
    "LoggedTable",
    "of_tables",
    "of_tensors",
    "tables_of_payload",
    "tensors_of",
]
