"""Parquet files, read by pyarrow a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from torch_dynemb.keyword_options import takes_options
from torch_dynemb.migrate.column_files import Column, ColumnFile, ColumnNames, open_columns
from torch_dynemb.migrate.raw_files import Paths
from torch_dynemb.migrate.source import Source

_DTYPES = {
    "int64": torch.int64,
    "uint64": torch.uint64,
    "int32": torch.int32,
    "uint32": torch.uint32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "double": torch.float64,
    "float": torch.float32,
    "halffloat": torch.float16,
}


class _ParquetFile(ColumnFile):
    owner, suffix = "read_parquet", ".parquet"
    needs = ("pyarrow", "pyarrow.parquet")
    remedy = "pip install 'torch_dynemb[parquet]', or pip install pyarrow"

    def __init__(self, path: Path, *modules: Any) -> None:
        super().__init__(path, *modules)
        self._arrow, self._parquet = modules

    def columns(self) -> dict[str, Column]:
        with self._opened() as file:
            rows = file.metadata.num_rows
            result = {}
            for field in file.schema_arrow:
                listed = _is_list(self._arrow, field.type)
                inner = field.type.value_type if listed else field.type
                dtype = _DTYPES.get(str(inner), str(field.type))
                width = self._width(file, field) if listed and str(inner) in _DTYPES else 0
                result[field.name] = Column(rows, width, dtype)
            return result

    def batches(self, names: Sequence[str], size: int) -> Iterator[dict[str, Tensor]]:
        with self._opened() as file:
            expected = {field.name: self._width(file, field) for field in file.schema_arrow}
            begin = 0
            try:
                for batch in file.iter_batches(batch_size=size, columns=list(dict.fromkeys(names))):
                    yield {
                        name: self._tensor(name, batch.column(name), expected[name], begin)
                        for name in names
                    }
                    begin += batch.num_rows
            except (OSError, self._arrow.ArrowException) as error:
                raise self._damaged(error) from error

    def _opened(self) -> Any:
        try:
            return self._parquet.ParquetFile(self.path)
        except (OSError, self._arrow.ArrowException) as error:
            raise self._damaged(error) from error

    def _width(self, file: Any, field: Any) -> int:
        """Return values of a row of a column of lists; 0: a column without lists."""
        if not _is_list(self._arrow, field.type):
            return 0
        if self._arrow.types.is_fixed_size_list(field.type):
            return int(field.type.list_size)
        first = next(file.iter_batches(batch_size=1, columns=[field.name]), None)
        if first is None or first.num_rows == 0 or not first.column(0)[0].is_valid:
            return 0
        return len(first.column(0)[0])

    def _tensor(self, name: str, column: Any, width: int, begin: int) -> Tensor:
        values = column
        if column.null_count > 0:
            raise ValueError(
                f"read_parquet: column {name!r} of {self.path} has no value in "
                f"{column.null_count} of the rows from {begin} on: leave these rows out"
            )
        if _is_list(self._arrow, column.type):
            if not self._arrow.types.is_fixed_size_list(column.type):
                lengths = _copied(column.value_lengths())
                other = (lengths != width).nonzero()
                if other.numel() > 0:
                    row = int(other[0])
                    raise ValueError(
                        f"read_parquet: row {begin + row} of column {name!r} of {self.path} has "
                        f"{int(lengths[row])} values, expected {width}, as many as the first one"
                    )
            values = column.flatten()
            if values.null_count > 0:
                raise ValueError(
                    f"read_parquet: column {name!r} of {self.path} has lists that lack a value, in "
                    f"the rows from {begin} on: leave these rows out"
                )
        flat = _copied(values)
        return flat.reshape(-1, width) if width else flat

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(
            f"read_parquet: {self.path} is damaged, or no Parquet file ({error}): write it anew"
        )


def _copied(values: Any) -> Tensor:
    """Return the values of an array of numbers without nulls."""
    dtype = _DTYPES[str(values.type)]
    begin = values.offset * dtype.itemsize
    memory = memoryview(values.buffers()[1] or b"").cast("B")
    of_values = bytearray(memory[begin : begin + len(values) * dtype.itemsize])
    return (
        torch.frombuffer(of_values, dtype=dtype)
        if of_values
        else torch.empty(0, dtype=dtype, device="cpu")
    )


def _is_list(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


@takes_options
def read_parquet(paths: Paths, **columns: Unpack[ColumnNames]) -> Source:
    """Read Parquet files with ids and rows as a source for :func:`load`.

    Columns have the names that :func:`torch_dynemb.checkpoint.export` writes, by default. Memory
    holds a batch, and pyarrow's buffers of a row group.

    Args:
        paths: a file, a list of files, or a folder, of which all files ``*.parquet`` are read.
        **columns: names of the columns.

    Returns:
        The source. Only schemas and first rows have been read.

    Raises:
        TypeError: an argument has a wrong type.
        ModuleNotFoundError: pyarrow is missing.
        FileNotFoundError: a file is missing.
        ValueError: a file is not a Parquet file, or lacks a column, or columns do not fit together.

    Example:
        >>> import tempfile, pyarrow, pyarrow.parquet, torch_dynemb as td
        >>> from torch_dynemb import migrate
        >>> folder = tempfile.TemporaryDirectory()
        >>> table = pyarrow.table({"user": [7, 8], "vector": [[0.5, 1.0], [1.5, 2.0]]})
        >>> pyarrow.parquet.write_table(table, folder.name + "/users.parquet")
        >>> source = migrate.read_parquet(
        ...     folder.name + "/users.parquet", ids="user", rows="vector"
        ... )
        >>> migrate.load(td.DynamicEmbedding(2, optimizer=td.SGD(lr=0.1)), source)["embedding"].ids
        2
        >>> folder.cleanup()
    """
    return open_columns(_ParquetFile, paths, columns)


__all__ = ["read_parquet"]
