"""Writer of the parts of a table from batches that mix rows of several parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.checkpoint.file_names import rows_file
from torch_dynemb.checkpoint.reading.saved_table import CheckpointTable
from torch_dynemb.checkpoint.saving.table_files import FILE_BYTES
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location
from torch_dynemb.files.scattered_file import ScatteredFile
from torch_dynemb.files.tensor_file import TensorShape
from torch_dynemb.files.uploads import limits_of
from torch_dynemb.parts.saved_tables import SavedFile
from torch_dynemb.rows.tensor_names import ID, WEIGHT, score_entry, state_entry
from torch_dynemb.table.row_batch import RowBatch


class TensorFiles(NamedTuple):
    """Destination of files.

    Attributes:
        disk: the file system.
        path: path of the unfinished checkpoint.
    """

    disk: Disk
    path: Location

    def create(self, name: str, tensors: Sequence[TensorShape]) -> ScatteredFile:
        """Create a file; its name is relative to the checkpoint."""
        path = self.path / name
        self.disk.make_folder(path.parent)
        return ScatteredFile(self.disk, path, tensors)

    def write(self, name: str, tensors: Sequence[tuple[str, Tensor]], rows: int) -> SavedFile:
        """Write a file of complete tensors."""
        shapes = [TensorShape(of, values.dtype, tuple(values.shape)) for of, values in tensors]
        file = self.create(name, shapes)
        try:
            for of, values in tensors:
                file.append(of, values.contiguous())
            return self.saved(name, file, rows)
        finally:
            file.close()

    def saved(self, name: str, file: ScatteredFile, rows: int) -> SavedFile:
        """Finish a file. Return its manifest entry."""
        sums = file.finish()
        within = f"{self.path.name}/{name}"
        return SavedFile(within, rows, sums.bytes, sums.block_bytes, list(sums.sums))


class PartOfTable(NamedTuple):
    """A part to be written.

    Attributes:
        number: number of the part.
        parts: number of parts.
        ids: number of ids.
        columns: columns of the part within the whole table.
        state_columns: by state tensor, the part's slice of a whole row's state; for one value per
            row, of the values of all column shards.
    """

    number: int
    parts: int
    ids: int
    columns: range
    state_columns: Mapping[str, slice]


class PartWriter:
    """Writer of the rows of a part into files of bounded size.

    Args:
        files: destination.
        table: table of the rows.
        part: part to write.

    Attributes:
        part: as given.
        files: manifest entries of the finished files.
        ids_crc32c: checksum of the written ids.
    """

    def __init__(self, files: TensorFiles, table: CheckpointTable, part: PartOfTable) -> None:
        self._to, self._table, self.part = files, table, part
        self.files: list[SavedFile] = []
        self.ids_crc32c = 0
        self._most = max(
            1,
            min(FILE_BYTES, limits_of(files.disk).file_bytes)
            // max(1, sum(of.bytes for of in self._tensors(1))),
        )
        self._file: ScatteredFile | None = None
        self._name = ""
        self._rows = self._written = 0  # rows of the file: expected and written
        self._done = 0  # rows in files that are whole

    def _tensors(self, count: int) -> list[TensorShape]:
        """List the tensors of a file with this number of rows."""
        columns = self.part.columns
        tensors = []
        if columns.start == 0:
            tensors.append(TensorShape(ID, torch.int64, (count,)))
            for word in self._table.scores:
                tensors.append(TensorShape(score_entry(word), torch.int64, (count,)))
        tensors.append(TensorShape(WEIGHT, self._table.dtype, (count, len(columns))))
        for of in self._table.state_tensors:
            at = self.part.state_columns[of.name]
            shape = (count, at.stop - at.start)
            tensors.append(TensorShape(state_entry(of.name), of.dtype, shape))
        return tensors

    def append(self, batch: RowBatch, places: Tensor) -> None:
        """Write the next rows.

        Args:
            batch: whole rows, with all scores and all state, by shard.
            places: int64 [n], positions of the part's ids in the batch.

        Raises:
            OSError: the disk is full, or fails.
        """
        begin, count = 0, places.numel()
        while begin < count:
            file = self._file or self._next_file()
            end = min(count, begin + self._rows - self._written)
            self._append(file, batch, places[begin:end])
            self._written += end - begin
            if self._written == self._rows:
                self._end_file()
            begin = end

    def _next_file(self) -> ScatteredFile:
        part = self.part
        self._rows, self._written = min(self._most, part.ids - self._done), 0
        self._name = rows_file(
            self._table.name, part.number, part.parts, part.columns, len(self.files)
        )
        self._file = self._to.create(self._name, self._tensors(self._rows))
        return self._file

    def _append(self, file: ScatteredFile, batch: RowBatch, places: Tensor) -> None:
        columns = self.part.columns
        ids = batch.ids[places]
        self.ids_crc32c = ops.crc32c(ids, self.ids_crc32c)
        if columns.start == 0:
            file.append(ID, ids)
            for word, scores in batch.scores.items():
                file.append(score_entry(word), scores.index_select(0, places))
        weights = batch.rows[:, columns.start : columns.stop]
        file.append(WEIGHT, weights.index_select(0, places))
        for name, values in batch.state.items():
            own = values[:, self.part.state_columns[name]]
            file.append(state_entry(name), own.index_select(0, places))

    def _end_file(self) -> None:
        assert self._file is not None
        self.files.append(self._to.saved(self._name, self._file, self._rows))
        self._file = None
        self._done += self._rows

    def finish(self) -> None:
        """Finish the part. A part without ids has one file without rows."""
        if not self.files and self.part.ids == 0:
            self._next_file()
            self._end_file()
        if self._done != self.part.ids:
            raise RuntimeError(
                f"checkpoint: part {self.part.number} of table {self._table.name!r} has "
                f"{self._done} rows, expected {self.part.ids}"
            )

    def close(self) -> None:
        """Close the file that is open, complete or not."""
        if self._file is not None:
            self._file.close()


__all__ = ["PartOfTable", "PartWriter", "TensorFiles"]
