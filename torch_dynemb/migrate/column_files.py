"""Files with named columns, such as npz and Parquet: ids, rows, optimizer state and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, text
from torch_dynemb.checkpoint.entries import ID, score_entry, state_entry
from torch_dynemb.migrate.files import paths_of
from torch_dynemb.migrate.raw_files import FLOAT_DTYPES, as_ids
from torch_dynemb.migrate.source import Source, SourceRows, with_columns
from torch_dynemb.table import RowBatch

ROW = "row"  # as torch_dynemb.checkpoint.export names the columns
INTEGERS = (torch.int64, torch.uint64, torch.int32, torch.uint32, torch.int16, torch.int8)


class Column(NamedTuple):
    """Shape and dtype of a column.

    Attributes:
        rows: of the file.
        columns: values of a row; 0: a single value, not a list.
        dtype: of the values; a str describes values that cannot be read.
    """

    rows: int
    columns: int
    dtype: torch.dtype | str


class Names(NamedTuple):
    """Selection of the columns to read.

    Attributes:
        ids, rows: columns of ids and of rows.
        state, scores: columns by the table's names of state and scores.
    """

    ids: str
    rows: str
    state: Mapping[str, str]
    scores: Mapping[str, str]

    @property
    def all(self) -> list[str]:
        """Names of columns."""
        return [self.ids, self.rows, *self.state.values(), *self.scores.values()]


class ColumnFile(ABC):
    """A file with named columns.

    Args:
        path: of the file.

    Attributes:
        path: as given.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """Return all columns, by name.

        Raises:
            ValueError: the file has another format, or is damaged.
        """

    @abstractmethod
    def batches(self, names: Sequence[str], size: int) -> Iterator[dict[str, Tensor]]:
        """Return all rows of some columns, at most ``size`` at a time.

        Raises:
            ValueError: the file is damaged.
        """


class ColumnSource(Source):
    """Source of files with named columns, see :func:`read_npz` and :func:`read_parquet`."""

    def __init__(
        self,
        owner: str,
        files: Sequence[ColumnFile],
        names: Names,
        optimizer_steps: int | None,
    ) -> None:
        self._files, self._names = files, names
        dim: int | None = None
        for file in files:
            of_file = self._checked(owner, file)
            if dim is not None and of_file is not None and of_file != dim:
                raise ValueError(
                    f"{owner}: rows of {file.path} have {of_file} values, but those of files "
                    f"before it have {dim}: give files of one table"
                )
            dim = dim or of_file
        more = f" and {len(files) - 1} others" if len(files) > 1 else ""
        super().__init__(
            f"{files[0].path}{more}",
            dim,
            state=tuple(names.state),
            scores=tuple(names.scores),
            optimizer_steps=optimizer_steps,
        )

    def _checked(self, owner: str, file: ColumnFile) -> int | None:
        """Check the columns of a file; return values of a row, or None for a file without rows."""
        there, names = file.columns(), self._names
        for name in names.all:
            if name not in there:
                raise ValueError(
                    f"{owner}: {file.path} has no column {name!r}, only {sorted(there)}: say which "
                    "one it is"
                )
        count = there[names.ids].rows
        for name in names.all:
            of = there[name]
            if of.rows != count:
                raise ValueError(
                    f"{owner}: column {name!r} of {file.path} has {of.rows} rows, but "
                    f"{names.ids!r} has {count}: it is damaged"
                )
            if isinstance(of.dtype, str):
                raise ValueError(
                    f"{owner}: column {name!r} of {file.path} is {of.dtype}, expected numbers: "
                    "convert it, or name another column"
                )
            whole = name == names.ids or name in names.scores.values()
            if whole and (of.columns != 0 or of.dtype not in INTEGERS):
                raise ValueError(
                    f"{owner}: column {name!r} of {file.path} is {_shown(of)}, expected an integer "
                    "for each row"
                )
        if count == 0 and there[names.rows].columns == 0:
            return None
        if there[names.rows].columns == 0 or there[names.rows].dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{owner}: column {names.rows!r} of {file.path} is {_shown(there[names.rows])}, "
                "expected floats [n, dim]"
            )
        return there[names.rows].columns

    def batches(self, size: int) -> Iterator[SourceRows]:
        names = self._names
        for file in self._files:
            begin = 0
            for read in file.batches(names.all, size):
                batch = RowBatch(
                    as_ids(read[names.ids]),
                    read[names.rows],
                    {name: with_columns(read[column]) for name, column in names.state.items()},
                    {name: as_ids(read[column]) for name, column in names.scores.items()},
                )
                yield SourceRows(batch, str(file.path), begin)
                begin += read[names.ids].numel()


def _shown(column: Column) -> str:
    return f"{column.dtype} [n{f', {column.columns}' if column.columns else ''}]"


def open_columns(
    owner: str,
    paths: object,
    make: Callable[[Path], ColumnFile],
    suffix: str,
    *,
    ids: str,
    rows: str,
    state: Mapping[str, str] | None,
    scores: Mapping[str, str] | None,
    optimizer_steps: int | None,
) -> Source:
    """Return a source of files with named columns; see :func:`read_npz`.

    Args:
        owner: prefix of error messages: the called function.
        paths: argument of the call.
        make: opens a file.
        suffix: of files in a folder.

    Raises:
        TypeError, FileNotFoundError, ValueError: see :func:`read_npz`.
    """
    files = [make(path) for path in _files_of(owner, paths, suffix)]
    there = files[0].columns()
    names = Names(
        text(f"{owner}: ids", ids),
        text(f"{owner}: rows", rows),
        _named(owner, "state", state, state_entry, there),
        _named(owner, "scores", scores, score_entry, there),
    )
    return ColumnSource(owner, files, names, optimizer_steps)


def _files_of(owner: str, paths: object, suffix: str) -> list[Path]:
    """List the given files, or those of a folder sorted by name."""
    if isinstance(paths, str | PathLike) and Path(paths).is_dir():
        found = sorted(Path(paths).glob(f"*{suffix}"))
        if not found:
            raise FileNotFoundError(f"{owner}: no file *{suffix} is in {Path(paths)}")
        return found
    return paths_of(f"{owner}: paths", paths)


def _named(
    owner: str,
    what: str,
    given: Mapping[str, str] | None,
    entry: Callable[[str], str],
    there: Mapping[str, Any],
) -> dict[str, str]:
    """Return column names by state or score; None: the columns that an export would write."""
    if given is None:
        prefix = entry("")
        return {
            name.removeprefix(prefix): name for name in sorted(there) if name.startswith(prefix)
        }
    if not isinstance(given, Mapping):
        raise TypeError(f"{owner}: {what} is {described(given)}, expected a dict of column names")
    return {
        text(f"{owner}: a name of {what}", key): text(f"{owner}: {what}[{key!r}]", column)
        for key, column in given.items()
    }


__all__ = ["ID", "ROW", "Column", "ColumnFile", "ColumnSource", "open_columns"]
