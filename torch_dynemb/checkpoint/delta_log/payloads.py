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

_MOST_JSON_BYTES = 16 << 20
_MOST_COLUMNS = 1 << 48


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

    def check(self) -> None:
        """Raises ValueError for values that no table has."""
        numbers = (self.embedding_dim, self.first_column, self.columns, self.optimizer_steps)
        whole = all(type(number) is int and 0 <= number < _MOST_COLUMNS for number in numbers)
        texts = isinstance(self.name, str) and isinstance(self.dtype, str)
        if not whole or not texts or not isinstance(self.optimizer, str | None):
            raise ValueError(f"{self} is no table")


def of_tensors(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Tensors as a safetensors file, in pieces.

    Args:
        tensors: by name, contiguous, on the CPU.

    Raises:
        TypeError: a dtype that the format does not have.
    """
    shapes = [TensorShape(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    header = header_of(shapes, alignment=8)
    _check_size(len(header))
    return [as_tensor(header), *tensors.values()]


def tensors_of(payload: Tensor) -> dict[str, Tensor]:
    """Views of the tensors in a payload.

    Args:
        payload: uint8 [n], what :func:`of_tensors` gives.

    Raises:
        ValueError: it is no such payload.
    """
    length = header_bytes(bytes(raw(payload[:8])))
    _check_size(length)
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


def of_tables(tables: list[LoggedTable]) -> list[Tensor]:
    """Descriptions of tables as JSON, in pieces."""
    text = json.dumps([asdict(table) for table in tables], separators=(",", ":")).encode()
    _check_size(len(text))
    return [as_tensor(text)]


def _check_size(size: int) -> None:
    """Raises ValueError for more JSON than a reader takes, of a hundred thousand tables."""
    if size > _MOST_JSON_BYTES:
        raise ValueError(
            f"delta log: {size} bytes describe tables or tensors, and {_MOST_JSON_BYTES} are the "
            "most: publish fewer tables and dense tensors in one log"
        )


def tables_of_payload(payload: Tensor) -> list[LoggedTable]:
    """Descriptions of tables.

    Args:
        payload: uint8 [n], what :func:`of_tables` gives.

    Raises:
        ValueError: it is no such payload.
    """
    _check_size(payload.numel())
    try:
        entries: list[dict[str, Any]] = json.loads(bytes(raw(payload)))
        tables = [LoggedTable(**entry) for entry in entries]
        for table in tables:
            table.check()
        return tables
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"its tables cannot be read: {error!r}") from error


__all__ = [
    "LoggedTable",
    "of_tables",
    "of_tensors",
    "tables_of_payload",
    "tensors_of",
]
