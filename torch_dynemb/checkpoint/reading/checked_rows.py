"""Reader of the rows of a saved part that returns only checked values.

It keeps one block for each tensor that is read: a table of any size takes a few MiB per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb.errors import DamagedFileError
from torch_dynemb.files.checksummed_files import ChecksummedReader
from torch_dynemb.files.locations import Location
from torch_dynemb.files.tensor_file import StoredTensor, as_bytes
from torch_dynemb.parts.saved_tables import SavedFile
from torch_dynemb.process.torch_modes import plain_torch


class _CheckedFile:
    """A file that reads and checks whole blocks before it returns values.

    Args:
        path: the file.
        file: its entry in the manifest.

    Raises:
        DamagedFileError: it is missing, or its header is damaged.
    """

    def __init__(self, path: Location, file: SavedFile) -> None:
        self._reader = ChecksummedReader(path, file.sums)
        self._block_bytes, self._bytes = file.block_bytes, file.bytes
        self._blocks: dict[str, tuple[int, Tensor]] = {}  # by tensor: number and values
        try:
            self._reader.finish()  # the blocks with the header
            for name, section in self._reader.tensors.items():
                if section.shape[:1] != (file.rows,):
                    raise DamagedFileError(
                        f"{path}: {name!r} has shape {section.shape}, expected {file.rows} rows",
                        path=path,
                    )
        except BaseException:
            self.close()
            raise

    def section(self, name: str) -> StoredTensor:
        """Return the place of a tensor."""
        if name not in self._reader.tensors:
            raise DamagedFileError(
                f"{self._reader.path}: the file lacks {name!r}", path=self._reader.path
            )
        return self._reader.tensors[name]

    def read(self, name: str, begin: int, out: Tensor) -> None:
        """Read rows from ``begin`` on into a contiguous CPU tensor."""
        if out.numel() == 0:
            return
        section = self.section(name)
        assert out.is_contiguous()
        target = as_bytes(out)
        first, done = section.begin + begin * section.row_bytes, 0
        while done < target.numel():
            number, inside = divmod(first + done, self._block_bytes)
            values = self._block(name, number)
            piece = values[inside : inside + target.numel() - done]
            target[done : done + piece.numel()] = piece
            done += piece.numel()

    def _block(self, name: str, number: int) -> Tensor:
        """Return a checked block. Small tensors in the same block share it."""
        known = self._blocks.get(name)
        if known is not None and known[0] == number:
            return known[1]
        same = next((of for of in self._blocks.values() if of[0] == number), None)
        if same is None:
            # a failed read must not leave its buffer in use
            known = self._blocks.pop(name, None)
            if known is None or any(of is known for of in self._blocks.values()):
                buffer = torch.empty(
                    min(self._block_bytes, self._bytes), dtype=torch.uint8, device="cpu"
                )
            else:
                buffer = known[1]
            size = min(self._block_bytes, self._bytes - number * self._block_bytes)
            self._reader.read_block(number, buffer[:size])
            same = number, buffer
        self._blocks[name] = same
        return same[1]

    def close(self) -> None:
        """Close the file."""
        self._blocks.clear()
        self._reader.close()


class CheckedRows:
    """The files of a part as if they were one, read from front to back.

    Args:
        folder: folder of the checkpoint.
        files: files of the part, one after another.
    """

    def __init__(self, folder: Location, files: Sequence[SavedFile]) -> None:
        self._folder, self._files = folder, list(files)
        self._begins = [sum(file.rows for file in files[:k]) for k in range(len(files))]
        self._open: dict[int, _CheckedFile] = {}
        self._closed = False
        self.count = sum(file.rows for file in files)

    @plain_torch()
    def read(self, name: str, begin: int, out: Tensor) -> None:
        """Read rows from ``begin`` on into a contiguous CPU tensor.

        Raises:
            DamagedFileError: a file is missing or damaged, or lacks the tensor.
            ValueError: the files are closed.
        """
        if self._closed:
            raise ValueError(f"checkpoint {self._folder} is closed: open it again to read of it")
        end = begin + out.shape[0]
        for k, (first, file) in enumerate(zip(self._begins, self._files, strict=True)):
            low, high = max(begin, first), min(end, first + file.rows)
            if low < high:
                here = out[low - begin : high - begin]
                found = self._file(k)
                self._check(found.section(name), name, out, file)
                found.read(name, low - first, here)

    def _file(self, number: int) -> _CheckedFile:
        if number not in self._open:
            file = self._files[number]
            self._open[number] = _CheckedFile(self._folder / file.path, file)
        return self._open[number]

    def _check(self, section: StoredTensor, name: str, out: Tensor, file: SavedFile) -> None:
        if section.dtype != out.dtype or section.shape[1:] != tuple(out.shape[1:]):
            raise DamagedFileError(
                f"{self._folder / file.path}: {name!r} has dtype {section.dtype} and rows of shape "
                f"{section.shape[1:]}, expected {out.dtype} and {tuple(out.shape[1:])}",
                path=self._folder / file.path,
            )

    def pass_by(self, row: int) -> None:
        """Close the files that end before this row."""
        for number in [k for k in self._open if self._begins[k] + self._files[k].rows <= row]:
            self._open.pop(number).close()

    def close(self) -> None:
        """Close all files."""
        self._closed = True
        for file in self._open.values():
            file.close()
        self._open.clear()


__all__ = ["CheckedRows"]
