"""Rows of a saved part with one or more files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.errors import DamagedFileError
from torch_dynemb.files.checksummed_files import (
    ChecksummedReader,
    ChecksummedReaders,
    open_readers,
)
from torch_dynemb.files.locations import Location
from torch_dynemb.files.tensor_file import StoredTensor
from torch_dynemb.parts.saved_tables import SavedFile, SavedPart, SavedTable
from torch_dynemb.rows.tensor_names import COUNT, ID, WEIGHT, score_entry, state_entry

PIECE_BYTES = 8 << 20


class TensorKind(NamedTuple):
    """Requirements on a tensor of a file.

    Attributes:
        dtypes: allowed dtypes.
        columns: sizes after the first dimension; -1: any.
    """

    dtypes: tuple[torch.dtype, ...]
    columns: tuple[int, ...] = ()

    def fits(self, section: StoredTensor) -> bool:
        """Return whether a tensor meets them."""
        columns = section.shape[1:]
        return (
            section.dtype in self.dtypes
            and len(columns) == len(self.columns)
            and all(own in (-1, size) for own, size in zip(self.columns, columns, strict=True))
        )


_NOTHING: Mapping[str, TensorKind] = MappingProxyType({})
_INT64 = TensorKind((torch.int64,))
# tensors in files of ids that wait for admission
COUNTED: Mapping[str, TensorKind] = MappingProxyType({ID: _INT64, COUNT: _INT64})


def kinds_of(table: SavedTable, part: SavedPart, words: Iterable[str]) -> dict[str, TensorKind]:
    """Return the tensors that files of a part must have.

    Args:
        table: the table.
        part: the part of it.
        words: names of the scores that are read.
    """
    dtype = table.column_dtype
    kinds = {WEIGHT: TensorKind((dtype,), (part.columns,))}
    if part.first_column == 0:
        kinds[ID] = _INT64
        kinds.update((score_entry(word), _INT64) for word in words)
    for of in table.state_tensors:
        # 8-bit state keeps scales between the columns
        columns = -1 if of.dtype == torch.uint8 else of.columns(part.columns)
        kinds[state_entry(of.name)] = TensorKind((of.dtype,), (columns,))
    return kinds


class SavedRows(ChecksummedReaders):
    """Reader of the files of a part as if they were one, piece by piece.

    Args:
        folder: folder of the checkpoint.
        files: files of the part.
        checked: whether checksums are compared; see :class:`ChecksummedReader`.
        kinds: tensors that every file must have.
        verified: by file, blocks that are already checked; see :class:`ChecksummedReader`.

    Raises:
        DamagedFileError: a file is missing or damaged, or has other tensors.
    """

    def __init__(
        self,
        folder: Location,
        files: Sequence[SavedFile],
        *,
        checked: bool,
        kinds: Mapping[str, TensorKind] = _NOTHING,
        verified: dict[str, set[int]] | None = None,
    ) -> None:
        super().__init__()
        self._begins: list[int] = []
        self.count = 0
        paths = [folder / file.path for file in files]

        def opened(number: int) -> ChecksummedReader:
            file = files[number]
            known = None if verified is None else verified.setdefault(file.path, set())
            return ChecksummedReader(paths[number], file.sums, checked=checked, verified=known)

        self._readers += open_readers(paths, opened)
        try:
            for file, reader in zip(files, self._readers, strict=True):
                self._begins.append(self.count)
                self.count += file.rows
                _check_tensors(reader, file.rows, self._readers[0], kinds)
        except BaseException:
            self.close()
            raise

    def section(self, name: str) -> StoredTensor:
        """Return the description of a tensor in the first file.

        Raises:
            DamagedFileError: a file lacks it.
        """
        for reader in self._readers:
            if name not in reader.tensors:
                raise DamagedFileError(f"{reader.path}: the file lacks {name!r}", path=reader.path)
        return self._readers[0].tensors[name]

    def read(self, name: str, begin: int, out: Tensor) -> None:
        """Read rows from ``begin`` on into a contiguous CPU tensor."""
        end = begin + out.shape[0]
        for reader, first in zip(self._readers, self._begins, strict=True):
            last = first + reader.tensors[name].shape[0]
            low, high = max(begin, first), min(end, last)
            if low < high:
                reader.read(name, low - first, out[low - begin : high - begin])

    def whole(self, name: str) -> Tensor:
        """Read all rows of a tensor."""
        section = self.section(name)
        out = torch.empty((self.count, *section.shape[1:]), dtype=section.dtype, device="cpu")
        step = max(1, PIECE_BYTES // max(1, section.row_bytes))
        for begin in range(0, self.count, step):
            self.read(name, begin, out[begin : begin + step])
        return out

    def ranges(self, row_bytes: int, within: range | None = None) -> Iterator[tuple[int, int]]:
        """Split rows into ranges of about 8 MiB. Yield begin and end of each.

        Args:
            row_bytes: bytes of a row.
            within: rows to split; default: all.
        """
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        rows = range(self.count) if within is None else within
        for begin in range(rows.start, rows.stop, step):
            yield begin, min(begin + step, rows.stop)


def _check_tensors(
    reader: ChecksummedReader, rows: int, first: ChecksummedReader, kinds: Mapping[str, TensorKind]
) -> None:
    """Raise DamagedFileError unless a file has tensors of these kinds, with this number of rows."""
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
