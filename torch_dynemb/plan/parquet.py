"""Columns of ids in Parquet files."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb.ops import hash_strings
from torch_dynemb.plan.lines import (
    ColumnIds,
    LineReader,
    Lines,
    check_number_columns,
    chosen_columns,
)

_BATCH_LINES = 1 << 18


def open_parquet(
    path: str, columns: Sequence[str] | None, values: Sequence[str] = ()
) -> LineReader:
    """Open a Parquet file; columns of integers or strings, or of lists of them, hold ids.

    Strings become ids by :func:`torch_dynemb.hash_strings`.

    Args:
        path: of the file.
        columns: names; None: all that hold ids.
        values: columns of numbers, booleans or timestamps, which are read as numbers; timestamps
            become seconds.

    Raises:
        ValueError: the file is not a Parquet file, is empty, lacks a column, or a requested column
            holds another type.
        ImportError: pyarrow is missing.
    """
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(
            f"{path} is in Parquet, which pyarrow reads: install it (pip install pyarrow), or "
            "write the ids of a column one by line"
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(
            f"{path} cannot be read as Parquet ({error}): write it again, or say with --format "
            "what it is"
        ) from error
    if file.metadata.num_rows == 0:
        raise ValueError(f"{path} is empty: a sample has a line at least")
    types = arrow.types
    kinds = {field.name: field.type for field in file.schema_arrow}
    numeric = (types.is_integer, types.is_floating, types.is_boolean, types.is_timestamp)
    check_number_columns(
        path, values, [n for n, kind in kinds.items() if any(a(kind) for a in numeric)]
    )
    of_ids = [name for name, kind in kinds.items() if _holds_ids(types, _item(arrow, kind))]
    of_ids = [name for name in of_ids if name not in values]
    names = chosen_columns(path, columns, of_ids if columns is None else list(kinds))
    for name in names:
        if name not in of_ids:
            raise ValueError(
                f"{path}: column {name!r} has type {kinds[name]}, expected integers, strings or "
                f"lists of them: choose among {', '.join(of_ids) or 'none'}"
            )
    if not names:
        raise ValueError(
            f"{path} has no column of integers, strings or lists of them: write its ids as such"
        )
    return LineReader(names, lambda: _batches(arrow, file, names, values))


def _holds_ids(types: Any, kind: Any) -> bool:
    return types.is_integer(kind) or _holds_strings(types, kind)


def _holds_strings(types: Any, kind: Any) -> bool:
    if types.is_dictionary(kind):
        kind = kind.value_type
    strings = (types.is_string, types.is_large_string, types.is_string_view)
    return any(is_kind(kind) for is_kind in strings)


def _item(arrow: Any, kind: Any) -> Any:
    """Return the type of a value, or of an element of a list."""
    types = arrow.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return kind.value_type if is_list else kind


def _batches(
    arrow: Any, file: Any, names: Sequence[str], values_of: Sequence[str]
) -> Iterator[Lines]:
    compute = importlib.import_module("pyarrow.compute")
    with file:
        for batch in file.iter_batches(batch_size=_BATCH_LINES, columns=[*names, *values_of]):
            columns = {}
            for name in names:
                values = batch.column(name)
                if values.type != _item(arrow, values.type):
                    lines = compute.list_parent_indices(values)
                    values = compute.list_flatten(values)
                else:
                    lines = arrow.array(range(len(values)), arrow.int64())
                columns[name] = _column(arrow, batch.num_rows, values, lines)
            numbers = {name: _numbers(arrow, batch.column(name)) for name in values_of}
            yield Lines(batch.num_rows, columns, numbers)


def _column(arrow: Any, count: int, values: Any, lines: Any) -> ColumnIds:
    there = values.is_valid()
    ids = _tensor(arrow, values.filter(there))
    tensor = _tensor(arrow, lines.filter(there))
    return ColumnIds(ids, tensor, count - len(tensor.unique_consecutive()))


def _numbers(arrow: Any, values: Any) -> Tensor:
    """Convert an array to float64; NaN: null. Timestamps become seconds."""
    types = arrow.types
    if types.is_timestamp(values.type):
        values = values.cast(arrow.timestamp("s"), safe=False).cast(arrow.int64())
    if types.is_boolean(values.type):
        values = values.cast(arrow.int8())
    missing = _tensor(arrow, values.is_null().cast(arrow.int8())).bool()
    wide = values.fill_null(0).cast(arrow.float64())
    if len(wide) == 0:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    data = wide.buffers()[1].slice(8 * wide.offset, 8 * len(wide))
    numbers = torch.frombuffer(bytearray(data), dtype=torch.float64)
    return numbers.masked_fill(missing, torch.nan)


def _tensor(arrow: Any, values: Any) -> Tensor:
    """Convert an array without nulls to int64; values above its range wrap around."""
    if _holds_strings(arrow.types, values.type):
        return hash_strings(values)
    wide = values if values.type == arrow.uint64() else values.cast(arrow.int64())
    if len(wide) == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    data = wide.buffers()[1].slice(8 * wide.offset, 8 * len(wide))
    return torch.frombuffer(bytearray(data), dtype=torch.int64)


__all__ = ["open_parquet"]
