"""Rows of a part of a saved table, whose files follow each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from torch_dynemb.checkpoint.manifest import SavedFile
from torch_dynemb.checkpoint.summed_files import DamagedFileError, SummedReader
from torch_dynemb.checkpoint.tensor_file import StoredTensor

PIECE_BYTES = 8 << 20


class SavedRows:
    """Reads the files of a part as if they were one, piece by piece.

    Args:
        folder: of the checkpoint.
        files: of the part.
        checked: whether sums are compared; see :class:`SummedReader`.

    Raises:
        DamagedFileError: a file is missing or damaged.
    """

    def __init__(self, folder: Path, files: Sequence[SavedFile], *, checked: bool) -> None:
        self._folder = folder
        self._readers: list[SummedReader] = []
        self._begins: list[int] = []
        self.count = 0
        try:
            for file in files:
                reader = SummedReader(folder / file.path, file.sums, checked=checked)
                self._readers.append(reader)
                self._begins.append(self.count)
                self.count += file.rows
                for name, section in reader.tensors.items():
                    if section.shape[:1] != (file.rows,):
                        raise DamagedFileError(
                            f"{folder / file.path}: {name!r} has shape {section.shape}, expected "
                            f"{file.rows} rows"
                        )
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
                raise DamagedFileError(f"{reader.path}: the file lacks {name!r}")
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

    def ranges(self, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Pieces of about 8 MiB of rows of so many bytes: where they begin and end."""
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        for begin in range(0, self.count, step):
            yield begin, min(begin + step, self.count)

    def finish(self) -> None:
        """Checks what was read last to the end of its block."""
        for reader in self._readers:
            reader.finish()

    def close(self) -> None:
        """Closes the files."""
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> SavedRows:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


__all__ = ["PIECE_BYTES", "SavedRows"]
