"""Rows of a part of a saved table, whose files follow each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.checkpoint.entries import (
    COUNT,
    ID,
    WEIGHT,
    score_entry,
    state_entry,
)
from torch_dynemb.checkpoint.files.checksummed_files import SummedReader, SummedReaders
from torch_dynemb.checkpoint.files.tensor_file import StoredTensor
from torch_dynemb.checkpoint.manifest.records import SavedFile, SavedPart, SavedTable
from torch_dynemb.errors import DamagedFileError

PIECE_BYTES = 8 << 20


class TensorKind(NamedTuple):
    """What a tensor of a file must be like.

    Attributes:
        dtypes: one of them.
        columns: sizes after the first dimension; -1: any.
    """

    dtypes: tuple[torch.dtype, ...]
    columns: tuple[int, ...] = ()

    def fits(self, section: StoredTensor) -> bool:
        """Whether a tensor is like this."""
        columns = section.shape[1:]
        return (
            section.dtype in self.dtypes
            and len(columns) == len(self.columns)
            and all(own in (-1, size) for own, size in zip(self.columns, columns, strict=True))
        )


_NOTHING: Mapping[str, TensorKind] = MappingProxyType({})
_INT64 = TensorKind((torch.int64,))
# of files of ids that wait for admission
COUNTED: Mapping[str, TensorKind] = MappingProxyType({ID: _INT64, COUNT: _INT64})


def kinds_of(table: SavedTable, part: SavedPart, words: Iterable[str]) -> dict[str, TensorKind]:
    """The tensors that files of a part must have.

    Args:
        table: that it is of.
        part: of the table.
        words: scores that are wanted.
    """
    dtype = table.column_dtype
    kinds = {WEIGHT: TensorKind((dtype,), (part.columns,))}
    if part.first_column == 0:
        kinds[ID] = _INT64
        kinds.update((score_entry(word), _INT64) for word in words)
    for name, per_row, dtype_name in () if table.optimizer is None else table.optimizer["state"]:
        dtype = getattr(torch, dtype_name)
        # 8-bit state has scales of its own between the columns
        columns = () if per_row else (-1,) if dtype == torch.uint8 else (part.columns,)
        kinds[state_entry(name)] = TensorKind((dtype,), columns)
    return kinds


class SavedRows(SummedReaders):
    """Reads the files of a part as if they were one, piece by piece.

    Args:
        folder: of the checkpoint.
        files: of the part.
        checked: whether sums are compared; see :class:`SummedReader`.
        kinds: tensors that every file must have.
        verified: by file, blocks that have been checked before; see :class:`SummedReader`.

    Raises:
        DamagedFileError: a file is missing or damaged, or has other tensors.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[SavedFile],
        *,
        checked: bool,
        kinds: Mapping[str, TensorKind] = _NOTHING,
        verified: dict[str, set[int]] | None = None,
    ) -> None:
        super().__init__()
        self._begins: list[int] = []
        self.count = 0
        try:
            for file in files:
                known = None if verified is None else verified.setdefault(file.path, set())
                reader = SummedReader(
                    folder / file.path, file.sums, checked=checked, verified=known
                )
                self._readers.append(reader)
                self._begins.append(self.count)
                self.count += file.rows
                _check_tensors(reader, file.rows, self._readers[0], kinds)
        except BaseException:
            self.close()
            raise

    def section(self, name: str) -> StoredTensor:
        """What a tensor is like in the first file.

        Raises:
            DamagedFileError: the files lack it.
        """
        for reader in self._readers:
            if name not in reader.tensors:
                raise DamagedFileError(f"{reader.path}: the file lacks {name!r}", path=reader.path)
        return self._readers[0].tensors[name]

    def read(self, name: str, begin: int, out: Tensor) -> None:
        """Fills a contiguous tensor of the CPU with rows from ``begin`` on."""
        end = begin + out.shape[0]
        for reader, first in zip(self._readers, self._begins, strict=True):
            last = first + reader.tensors[name].shape[0]
            low, high = max(begin, first), min(end, last)
            if low < high:
                reader.read(name, low - first, out[low - begin : high - begin])

    def whole(self, name: str) -> Tensor:
        """All rows of a tensor."""
        section = self.section(name)
        out = torch.empty((self.count, *section.shape[1:]), dtype=section.dtype)
        step = max(1, PIECE_BYTES // max(1, section.row_bytes))
        for begin in range(0, self.count, step):
            self.read(name, begin, out[begin : begin + step])
        return out

    def ranges(self, row_bytes: int, within: range | None = None) -> Iterator[tuple[int, int]]:
        """Pieces of about 8 MiB of rows of so many bytes: where they begin and end.

        Args:
            row_bytes: of a row.
            within: of these rows; default: of all.
        """
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        rows = range(self.count) if within is None else within
        for begin in range(rows.start, rows.stop, step):
            yield begin, min(begin + step, rows.stop)


def _check_tensors(
    reader: SummedReader, rows: int, first: SummedReader, kinds: Mapping[str, TensorKind]
) -> None:
    """Raises DamagedFileError unless a file has tensors of so many rows, and of these kinds."""
    for name, section in reader.tensors.items():
        if section.shape[:1] != (rows,):
            raise DamagedFileError(
                f"{reader.path}: {name!r} has shape {section.shape}, expected {rows} rows",
                path=reader.path,
            )
    for name, kind in kinds.items():
        own = reader.tensors.get(name)
        if own is None:
            raise DamagedFileError(f"{reader.path}: the file lacks {name!r}", path=reader.path)
        other = first.tensors[name]
        if not kind.fits(own) or (own.dtype, own.shape[1:]) != (other.dtype, other.shape[1:]):
            raise DamagedFileError(
                f"{reader.path}: {name!r} is {own.dtype} {own.shape}, expected "
                f"{' or '.join(map(str, kind.dtypes))} {(rows, *kind.columns)}, as in all files",
                path=reader.path,
            )


__all__ = ["COUNTED", "PIECE_BYTES", "SavedRows", "TensorKind", "kinds_of"]
