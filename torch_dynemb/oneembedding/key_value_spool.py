"""Temporary files for rows in any order, in which the last value of an id counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from torch_dynemb.files.tensor_file import raw


class KeyValueSpool:
    """Ids and values in two files, in order of arrival.

    Args:
        folder: of the files.
        number: of the table; part of the file names.
        value_type: of the values.
        width: elements of a value.
    """

    def __init__(self, folder: Path, number: int, value_type: torch.dtype, width: int) -> None:
        self._value_type, self._width = value_type, width
        self._paths = [folder / f"spool-{number}-{kind}" for kind in ("ids", "values")]
        self._files: list[BinaryIO] = [path.open("wb") for path in self._paths]
        self._rows = 0

    def append(self, ids: Tensor, values: Tensor) -> None:
        """Append rows.

        Args:
            ids: int64 [n].
            values: [n, width], of the spool's value type.

        Raises:
            OSError: the disk is full, or fails.
        """
        for file, tensor in zip(self._files, (ids, values), strict=True):
            file.write(raw(tensor.contiguous()))
        self._rows += ids.shape[0]

    def places(self) -> Tensor:
        """Return the last position of each id, int64 [distinct ids], ascending; ends writing."""
        for file in self._files:
            file.flush()
        ids = self._mapped(0, torch.int64, 1)[:, 0]
        order = torch.argsort(ids, stable=True)
        ordered = ids[order]
        last = torch.ones_like(ordered, dtype=torch.bool)
        last[:-1] = ordered[1:] != ordered[:-1]
        return order[last].sort().values

    def batches(self, places: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Read the rows at the given positions.

        Args:
            places: int64 [n], as returned by :meth:`places`.
            size: maximum number of rows of a batch.

        Returns:
            An iterator of ids [n] and values [n, width].
        """
        ids = self._mapped(0, torch.int64, 1)[:, 0]
        values = self._mapped(1, self._value_type, self._width)
        for begin in range(0, places.shape[0], size):
            part = places[begin : begin + size]
            yield ids[part], values[part]

    def _mapped(self, file: int, dtype: torch.dtype, width: int) -> Tensor:
        """Map a file as [rows, width]; only pages that are read take memory."""
        if self._rows == 0:  # an empty file cannot be mapped
            return torch.empty(0, width, dtype=dtype, device="cpu")
        path, size = str(self._paths[file]), self._rows * width
        return torch.from_file(path, shared=False, size=size, dtype=dtype).view(-1, width)

    def remove(self) -> None:
        """Remove the files."""
        for file, path in zip(self._files, self._paths, strict=True):
            file.close()
            path.unlink(missing_ok=True)


__all__ = ["KeyValueSpool"]
