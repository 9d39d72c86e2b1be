"""Files with named columns, such as npz and Parquet: ids, rows, optimizer state and scores."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, text
from torch_dynemb.migrate.files import paths_of
from torch_dynemb.migrate.raw_files import FLOAT_DTYPES, as_ids
from torch_dynemb.migrate.source import Source, SourceRows, with_columns
from torch_dynemb.rows.tensor_names import ID, score_entry, state_entry
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


class ColumnNames(TypedDict, total=False):
    """Columns that :func:`read_npz` and :func:`read_parquet` read.

    Attributes:
        ids: name of the column of ids, of integers.
        rows: name of the column of rows: float16, float32 or float64 [n, dim], or lists of them of
            one length.
        state: names of the columns of optimizer state, by the optimizer's name of the state. A
            column is like that of rows, or has numbers if a row has one value. Default: columns
            ``state.NAME``.
        scores: names of the columns of scores, of integers, by ``step``, ``timestamp`` (seconds),
            ``frequency``, ``custom`` or ``expiry`` (seconds). Default: columns ``score.NAME``.
        optimizer_steps: as in :func:`read_tensors`.
    """

    ids: Annotated[str, ID]
    rows: Annotated[str, ROW]
    state: Annotated[Mapping[str, str] | None, None]
    scores: Annotated[Mapping[str, str] | None, None]
    optimizer_steps: Annotated[int | None, None]


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
        modules: those that the format needs.

    Attributes:
        path, modules: as given.
        owner: prefix of error messages: the called function.
        suffix: of files in a folder.
        needs: names of the modules, the package first.
        remedy: installs the package.
    """

    owner: ClassVar[str]
    suffix: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    remedy: ClassVar[str]

    def __init__(self, path: Path, *modules: Any) -> None:
        self.path, self.modules = path, modules

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
        self, files: Sequence[ColumnFile], names: Names, optimizer_steps: int | None
    ) -> None:
        self._files, self._names = files, names
        dim: int | None = None
        for file in files:
            of_file = self._checked(file)
            if dim is not None and of_file is not None and of_file != dim:
                raise ValueError(
                    f"{file.owner}: rows of {file.path} have {of_file} values, but those of files "
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

    def _checked(self, file: ColumnFile) -> int | None:
        """Check the columns of a file; return values of a row, or None for a file without rows."""
        there, names, owner = file.columns(), self._names, file.owner
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


def open_columns(kind: type[ColumnFile], paths: object, options: ColumnNames) -> Source:
    """Return a source of files with named columns; see :func:`read_npz`.

    Args:
        kind: format of the files.
        paths, options: arguments of the call.

    Raises:
        TypeError, ModuleNotFoundError, FileNotFoundError, ValueError: see :func:`read_npz`.
    """
    owner = kind.owner
    try:
        modules = [importlib.import_module(name) for name in kind.needs]
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{owner}: needs {kind.needs[0]}, which cannot be imported ({error}): {kind.remedy}"
        ) from error
    files = [kind(path, *modules) for path in _files_of(owner, paths, kind.suffix)]
    there = files[0].columns()
    names = Names(
        text(f"{owner}: ids", options["ids"]),
        text(f"{owner}: rows", options["rows"]),
        _named(owner, "state", options["state"], state_entry, there),
        _named(owner, "scores", options["scores"], score_entry, there),
    )
    return ColumnSource(files, names, options["optimizer_steps"])


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


__all__ = ["Column", "ColumnFile", "ColumnNames", "ColumnSource", "open_columns"]
