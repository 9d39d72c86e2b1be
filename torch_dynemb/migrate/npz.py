"""NumPy's npz files, read a piece at a time: an array need not fit in memory."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from torch_dynemb.files.tensor_file import raw
from torch_dynemb.keyword_options import takes_options
from torch_dynemb.migrate.column_files import Column, ColumnFile, ColumnNames, open_columns
from torch_dynemb.migrate.raw_files import Paths
from torch_dynemb.migrate.source import Source

_SUFFIX = ".npy"
_DAMAGED = zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError
_DTYPES = {
    "<i8": torch.int64,
    "<u8": torch.uint64,
    "<i4": torch.int32,
    "<u4": torch.uint32,
    "<i2": torch.int16,
    "|i1": torch.int8,
    "|u1": torch.uint8,
    "<f8": torch.float64,
    "<f4": torch.float32,
    "<f2": torch.float16,
}


class _Array:
    """Array of a file, after its header.

    Args:
        column: its shape and dtype.
        by_columns: whether it is in Fortran's order, which is read whole.
        stream: stream of its values.

    Attributes:
        column, stream: as given.
    """

    def __init__(self, column: Column, by_columns: bool, stream: Any) -> None:
        self.column, self.stream = column, stream
        whole = self._next(column.columns, column.rows) if by_columns else None
        self._whole = None if whole is None else whole.t().contiguous()

    def read(self, begin: int, rows: int) -> Tensor:
        """Read the next rows, from number ``begin`` on."""
        if self._whole is not None:
            return self._whole[begin : begin + rows]
        columns = self.column.columns
        return self._next(rows, columns) if columns else self._next(rows)

    def _next(self, *shape: int) -> Tensor:
        dtype = self.column.dtype
        assert isinstance(dtype, torch.dtype)  # others are refused before
        result = torch.empty(shape, dtype=dtype, device="cpu")
        memory, done = raw(result), 0
        while done < len(memory):
            piece = self.stream.read(min(len(memory) - done, 1 << 20))
            if not piece:
                raise EOFError("it ends too early")
            memory[done : done + len(piece)] = piece
            done += len(piece)
        return result


class _NpzFile(ColumnFile):
    owner, suffix = "read_npz", ".npz"
    needs, remedy = ("numpy",), "pip install numpy"

    def columns(self) -> dict[str, Column]:
        result = {}
        try:
            with zipfile.ZipFile(self.path) as file:
                for member in file.namelist():
                    if not member.endswith(_SUFFIX):
                        continue
                    with file.open(member) as stream:
                        name = member.removesuffix(_SUFFIX)
                        result[name], _ = self._header(stream)
        except _DAMAGED as error:
            raise self._damaged(error) from error
        return result

    def batches(self, names: Sequence[str], size: int) -> Iterator[dict[str, Tensor]]:
        with ExitStack() as stack:
            try:
                file = stack.enter_context(zipfile.ZipFile(self.path))
                arrays = {}
                for name in names:
                    stream = stack.enter_context(file.open(name + _SUFFIX))
                    arrays[name] = _Array(*self._header(stream), stream)
                rows = arrays[names[0]].column.rows
                for begin in range(0, rows, size):
                    count = min(size, rows - begin)
                    yield {name: array.read(begin, count) for name, array in arrays.items()}
                for array in arrays.values():
                    array.stream.read(1)  # verifies the checksum of the array
            except (*_DAMAGED, KeyError) as error:
                raise self._damaged(error) from error

    def _header(self, stream: Any) -> tuple[Column, bool]:
        """Read the header of an array, up to its values; also return whether columns come first."""
        numpy_format = self.modules[0].lib.format
        try:
            version = numpy_format.read_magic(stream)
            read = {
                (1, 0): numpy_format.read_array_header_1_0,
                (2, 0): numpy_format.read_array_header_2_0,
            }[version]
            shape, by_columns, dtype = read(stream)
        except (ValueError, KeyError) as error:
            raise self._damaged(error) from error
        known = _DTYPES.get(dtype.str)
        if known is None or len(shape) not in (1, 2):
            described = f"{dtype.name} ({dtype.str}) of shape {shape}"
            return Column(shape[0] if shape else 0, 0, described), False
        columns = shape[1] if len(shape) == 2 else 0
        return Column(shape[0], columns, known), by_columns and columns > 0

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(
            f"read_npz: {self.path} is damaged, or no npz file ({type(error).__name__}: {error}): "
            "write it anew"
        )


@takes_options
def read_npz(paths: Paths, **columns: Unpack[ColumnNames]) -> Source:
    """Read npz files with ids and rows as a source for :func:`load`.

    Arrays have the names that :func:`torch_dynemb.checkpoint.export` writes, by default. Arrays
    in C's order are read a piece at a time, also compressed ones; they need not fit in memory. An
    array in Fortran's order is read whole, so it must fit.

    Args:
        paths: a file, a list of files, or a folder, of which all files ``*.npz`` are read.
        **columns: names of the arrays.

    Returns:
        The source. Only headers have been read.

    Raises:
        TypeError: an argument has a wrong type.
        ModuleNotFoundError: numpy is missing.
        FileNotFoundError: a file is missing.
        ValueError: a file is not an npz file, or lacks an array, or arrays do not fit together.

    Example:
        >>> import tempfile, numpy, torch_dynemb as td
        >>> from torch_dynemb import migrate
        >>> folder = tempfile.TemporaryDirectory()
        >>> vectors = numpy.ones((3, 4), numpy.float32)
        >>> numpy.savez(folder.name + "/table.npz", key=numpy.arange(3), vector=vectors)
        >>> source = migrate.read_npz(folder.name + "/table.npz", ids="key", rows="vector")
        >>> migrate.load(td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1)), source)["embedding"].ids
        3
        >>> folder.cleanup()
    """
    return open_columns(_NpzFile, paths, columns)


__all__ = ["read_npz"]
