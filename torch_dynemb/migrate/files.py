"""Files with the elements of an array and no header, read a piece at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described
from torch_dynemb.files.tensor_file import raw

Path_ = str | PathLike[str]


def paths_of(owner: str, paths: object) -> list[Path]:
    """Check that the argument is one path or several, of existing files.

    Args:
        owner: prefix of error messages: function and argument.
        paths: the argument.

    Raises:
        TypeError: they are not paths.
        FileNotFoundError: a file does not exist.
        ValueError: the list is empty.
    """
    several = [paths] if isinstance(paths, str | PathLike) else paths
    if not isinstance(several, Sequence) or not all(isinstance(p, str | PathLike) for p in several):
        raise TypeError(f"{owner} is {described(paths)}, expected a path or a list of paths")
    if not several:
        raise ValueError(f"{owner} is empty, expected at least one path")
    found = [Path(os.fspath(path)) for path in several]
    for path in found:
        if not path.is_file():
            raise FileNotFoundError(f"{owner}: file {path} does not exist")
    return found


class RawFile:
    """Reader of an array without a header; a context manager that closes the file.

    Args:
        path: of the file.
        dtype: of its elements, in the byte order of this machine.
        columns: elements of a row; None: a row is one element, and pieces are [n].
        begin: the first byte of the first row.
        rows: number of rows; None: all rows of the file.

    Attributes:
        path: as given.
        rows: of the array.

    Raises:
        ValueError: the file does not end with a whole row, or has fewer than ``rows``.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        columns: int | None = None,
        *,
        begin: int = 0,
        rows: int | None = None,
    ) -> None:
        self.path, self._dtype, self._begin = path, dtype, begin
        self._shape = () if columns is None else (columns,)
        self._row_bytes = dtype.itemsize * (1 if columns is None else columns)
        size = path.stat().st_size - begin
        if rows is None:
            rows, rest = divmod(size, self._row_bytes)
            if rest:
                raise ValueError(
                    f"{path} has {size} bytes, which is not a whole number of rows of "
                    f"{self._row_bytes} bytes ({self._shape or (1,)} of {dtype}): it is cut off, "
                    "or of another dtype or dim"
                )
        elif size < rows * self._row_bytes:
            raise ValueError(
                f"{path} has {max(size, 0)} bytes from byte {begin} on, expected "
                f"{rows * self._row_bytes}: it is cut off"
            )
        self.rows = rows
        self._file: BinaryIO | None = None

    def __enter__(self) -> RawFile:
        self._file = self.path.open("rb", buffering=0)
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, begin: int, end: int) -> Tensor:
        """Read rows.

        Args:
            begin, end: their range.

        Returns:
            [end - begin, columns], or [end - begin].

        Raises:
            ValueError: the file has become shorter.
        """
        assert self._file is not None
        result = torch.empty((end - begin, *self._shape), dtype=self._dtype, device="cpu")
        memory, done = raw(result), 0
        self._file.seek(self._begin + begin * self._row_bytes)
        while done < len(memory):
            count = self._file.readinto(memory[done:])  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"{self.path} ends before row {end}: it is cut off")
            done += count
        return result


__all__ = ["Path_", "RawFile", "paths_of"]
