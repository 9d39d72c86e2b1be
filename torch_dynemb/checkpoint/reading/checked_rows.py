"""Reads rows of a saved part from front to back, and gives out nothing that has not been checked.

Of each tensor that is read, one block is held: a table of any size takes a few MiB for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torch_dynemb.checkpoint.files.checksummed_files import SummedReader
from torch_dynemb.checkpoint.files.tensor_file import StoredTensor, as_bytes
from torch_dynemb.checkpoint.manifest.records import SavedFile
from torch_dynemb.checkpoint.plain_torch import plain_torch
from torch_dynemb.errors import DamagedFileError


class _CheckedFile:
    """A file of which whole blocks are read, and checked, before values are taken from them.

    Args:
        path: of the file.
        file: what it should be.

    Raises:
        DamagedFileError: it is missing, or its header is damaged.
    """

    def __init__(self, path: Path, file: SavedFile) -> None:
        self._reader = SummedReader(path, file.sums)
        self._block_bytes, self._bytes = file.block_bytes, file.bytes
        self._held: dict[str, tuple[int, Tensor]] = {}  # tensor -> number of its block, and values
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
        """Where a tensor lies."""
        if name not in self._reader.tensors:
            raise DamagedFileError(
                f"{self._reader.path}: the file lacks {name!r}", path=self._reader.path
            )
        return self._reader.tensors[name]

    def read(self, name: str, begin: int, out: Tensor) -> None:
        """Fills a contiguous tensor of the CPU with rows from ``begin`` on."""
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
        """A checked block; small tensors that lie in one share it."""
        held = self._held.get(name)
        if held is not None and held[0] == number:
            return held[1]
        same = next((of for of in self._held.values() if of[0] == number), None)
        if same is None:
            # what a failure leaves half read is nobody's
            held = self._held.pop(name, None)
            if held is None or any(of is held for of in self._held.values()):
                buffer = torch.empty(min(self._block_bytes, self._bytes), dtype=torch.uint8)
            else:
                buffer = held[1]
            size = min(self._block_bytes, self._bytes - number * self._block_bytes)
            self._reader.read_block(number, buffer[:size])
            same = number, buffer
        self._held[name] = same
        return same[1]

    def close(self) -> None:
        """Closes the file."""
        self._held.clear()
        self._reader.close()


class CheckedRows:
    """The files of a part as if they were one, read from front to back.

    Args:
        folder: of the checkpoint.
        files: of the part, one after another.
    """

    def __init__(self, folder: Path, files: Sequence[SavedFile]) -> None:
        self._folder, self._files = folder, list(files)
        self._begins = [sum(file.rows for file in files[:k]) for k in range(len(files))]
        self._open: dict[int, _CheckedFile] = {}
        self._closed = False
        self.count = sum(file.rows for file in files)

    @plain_torch()
    def read(self, name: str, begin: int, out: Tensor) -> None:
        """Fills a contiguous tensor of the CPU with rows from ``begin`` on.

        Raises:
            DamagedFileError: a file is missing or damaged, or has no such tensor.
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
        """Closes the files whose rows are all before this one."""
        for number in [k for k in self._open if self._begins[k] + self._files[k].rows <= row]:
            self._open.pop(number).close()

    def close(self) -> None:
        """Closes all files."""
        self._closed = True
        for file in self._open.values():
            file.close()
        self._open.clear()


__all__ = ["CheckedRows"]
