"""Records of sample readers: ids of columns, a batch of lines at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class ColumnIds(NamedTuple):
    """The ids of a column in a batch of lines.

    Attributes:
        ids: int64 [n]; a line has zero, one or several.
        lines: int64 [n], the line of each in the batch, from 0, ascending.
        missing: number of lines without an id.
    """

    ids: Tensor
    lines: Tensor
    missing: int


@dataclass(frozen=True)
class Lines:
    """A batch of lines.

    Attributes:
        count: number of lines.
        columns: their ids, by name of the column.
        values: float64 [count], values of the columns read as numbers, by name; NaN: missing.
    """

    count: int
    columns: dict[str, ColumnIds]
    values: dict[str, Tensor] = field(default_factory=dict)


class LineReader(NamedTuple):
    """A file with known columns.

    Attributes:
        columns: names of the columns to read.
        batches: iterator over batches of lines.
    """

    columns: list[str]
    batches: Callable[[], Iterator[Lines]]


def chosen_columns(path: str, asked: Sequence[str] | None, there: Sequence[str]) -> list[str]:
    """Select the columns to read from those of a file.

    Args:
        path: of the file, for the error.
        asked: names; None: all.
        there: columns of the file.

    Raises:
        ValueError: the file lacks a column, or a column is named twice.
    """
    if asked is None:
        return list(there)
    for name in asked:
        if name not in there:
            raise ValueError(
                f"--columns names {name!r}, which {path} has not: choose among {', '.join(there)}"
            )
    if len(set(asked)) < len(asked):
        raise ValueError(f"--columns is {','.join(asked)}: name every column once")
    return list(asked)


def first_lines(batch: Lines, count: int) -> Lines:
    """Return the first ``count`` lines of a batch."""
    columns = {}
    for name, column in batch.columns.items():
        kept = column.lines < count
        ids, lines = column.ids[kept], column.lines[kept]
        columns[name] = ColumnIds(ids, lines, count - len(lines.unique_consecutive()))
    return Lines(count, columns, {name: numbers[:count] for name, numbers in batch.values.items()})


def check_number_columns(path: str, values: Sequence[str], there: Sequence[str]) -> None:
    """Raise ValueError unless a file has the columns to read as numbers.

    Args:
        path: of the file.
        values: names of the columns.
        there: columns of the file that hold numbers.
    """
    for name in values:
        if name not in there:
            known = f"choose among {', '.join(there)}" if there else "it has none: use Parquet"
            raise ValueError(f"{path} has no column {name!r} of numbers: {known}")


__all__ = [
    "ColumnIds",
    "LineReader",
    "Lines",
    "check_number_columns",
    "chosen_columns",
    "first_lines",
]
