"""Tables of an increment, read from its batches of changes, record by record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from torch_dynemb.argument_checks import integer
from torch_dynemb.changes.batch import (
    COUNTS,
    ERASE,
    ROWS,
    SKETCH,
    TABLES,
    RecordPlace,
    index_of,
    payload_of,
)
from torch_dynemb.changes.commits import (
    checked_counts,
    checked_ids,
    checked_rows,
    checked_sketch,
    combined,
)
from torch_dynemb.changes.payloads import LoggedPart, tables_of
from torch_dynemb.checkpoint.manifest.records import Manifest
from torch_dynemb.checkpoint.reading.saved_table import (
    CheckpointFiles,
    CheckpointTable,
)
from torch_dynemb.errors import DamagedFileError
from torch_dynemb.files.checksummed_files import ChecksummedReader
from torch_dynemb.files.locations import Location
from torch_dynemb.optim.base import StateTensor
from torch_dynemb.parts.saved_checks import check_parts
from torch_dynemb.parts.saved_tables import SavedFile, SavedPart, SavedTable
from torch_dynemb.parts.whole_tables import together
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.row_batch import RowBatch

Taken = TypeVar("Taken")


class ChangesFile:
    """The batch of a rank in an increment. One record of it is in memory at a time.

    Args:
        folder: folder of the increment.
        file: entry of the batch in the manifest.

    Attributes:
        index: places of its records.
        tables: descriptions of its tables.

    Raises:
        DamagedFileError: it is missing or damaged.
    """

    def __init__(self, folder: Location, file: SavedFile) -> None:
        self.path, self._file = folder / file.path, file
        reader = self.reader()
        try:
            last = len(file.crc32c) - 1
            size = file.bytes - max(0, last) * file.block_bytes
            # this block has the commit: its chain covers everything in the batch
            reader.read_block(last, torch.empty(size, dtype=torch.uint8, device="cpu"))
            with self.understood():
                self.index = index_of(file.bytes, reader.read_bytes)
                self.tables: list[LoggedPart] = []
                for number, place in enumerate(self.index.places):
                    if place.kind == TABLES:
                        self.tables = tables_of(payload_of(self.index, number, reader.read_bytes))
        finally:
            reader.close()

    def reader(self) -> ChecksummedReader:
        """Open the file."""
        return ChecksummedReader(self.path, self._file.sums, has_header=False)

    def records(
        self, reader: ChecksummedReader, kind: int, table: int, take: Callable[[Tensor], Taken]
    ) -> Iterator[Taken]:
        """Read some records one after another.

        Args:
            reader: result of :meth:`reader`.
            kind: kind of the records.
            table: number of the table in the batch.
            take: converts a payload.

        Raises:
            DamagedFileError: a record is damaged.
        """
        for number, place in enumerate(self.index.places):
            if (place.kind, place.table) == (kind, table):
                with self.understood():
                    taken = take(payload_of(self.index, number, reader.read_bytes))
                yield taken

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Name the file in errors about its content."""
        try:
            yield
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, DamagedFileError) and error.path is not None:
                raise
            raise DamagedFileError(
                f"{self.path}: {error}: the file was damaged after it was written", path=self.path
            ) from error


def changes_of(folder: Location, manifest: Manifest) -> tuple[list[ChangesFile], Manifest]:
    """Open the batches of an increment. Return its manifest with the tables that they describe.

    Args:
        folder: folder of the increment.
        manifest: its manifest.

    Raises:
        DamagedFileError: a batch is missing or damaged.
    """
    batches = [ChangesFile(folder, file) for file in manifest.changes]
    parts = []
    for rank, batch in enumerate(batches):
        head = batch.index.head
        if (head.rank, head.ranks, head.base) != (rank, manifest.ranks, manifest.parent):
            raise DamagedFileError(
                f"{batch.path}: it is a batch of rank {head.rank} of {head.ranks}, after the "
                f"checkpoint {head.base}, which does not belong to this increment",
                path=batch.path,
            )
        for number, (name, table) in enumerate(batch.tables):
            part = table.parts[0]
            if (part.rank, part.number) != (rank, number):
                raise DamagedFileError(
                    f"{batch.path}: table {number} is described as {part.number} of rank "
                    f"{part.rank}",
                    path=batch.path,
                )
            parts.append((name, table))
    tables = together(parts)
    try:
        for name, table in tables.items():
            check_parts(name, table)
    except ValueError as error:
        raise DamagedFileError(f"{folder}: {error}", path=folder) from error
    return batches, replace(manifest, tables=tables)


class ChangedTable(CheckpointTable):
    """A table of an increment: changed ids with their rows, and removed ids.

    Args:
        name: name of the table.
        saved: its description in the batches.
        files: access to its files.
        batches: batches of all ranks.
    """

    def __init__(
        self,
        name: str,
        saved: SavedTable,
        files: CheckpointFiles,
        batches: Sequence[ChangesFile],
    ) -> None:
        super().__init__(name, saved, files)
        self._changes = batches

    @property
    def counts_ids(self) -> bool:
        return any(self._places(part, COUNTS) for part in self._saved.first_parts)

    def _batches(
        self,
        size: int,
        state: Sequence[StateTensor],
        words: tuple[str, ...],
        columns: Sequence[range] | None = None,
    ) -> Iterator[RowBatch]:
        for first in self._saved.first_parts:
            parts = self._shards_of(first)
            with self._changes[first.rank].understood():
                for shards in zip(*map(self._rows, parts), strict=True):
                    batch = combined(self._saved, self.name, shards, columns)
                    if batch.ids.numel() == 0:
                        continue
                    batch = batch._replace(
                        state={of.name: batch.state[of.name] for of in state},
                        scores={word: batch.scores[word] for word in words},
                    )
                    for begin in range(0, batch.ids.numel(), size):
                        yield batch.picked(slice(begin, begin + size))

    def _rows(self, part: SavedPart) -> Iterator[RowBatch]:
        logged = self._logged(part)
        return self._records(part, ROWS, lambda payload: checked_rows(logged, payload))

    def _logged(self, part: SavedPart) -> LoggedPart:
        return self._changes[part.rank].tables[part.number]

    def _places(self, part: SavedPart, kind: int) -> list[RecordPlace]:
        places = self._changes[part.rank].index.places
        return [of for of in places if (of.kind, of.table) == (kind, part.number)]

    def _records(
        self, part: SavedPart, kind: int, take: Callable[[Tensor], Taken]
    ) -> Iterator[Taken]:
        batch = self._changes[part.rank]
        with self._files.opened(batch.reader()) as reader:
            yield from batch.records(reader, kind, part.number, take)

    def id_batches(self, size: int) -> Iterator[Tensor]:
        size = integer("id_batches: size", size, least=1)
        for part in self._saved.first_parts:
            for rows in self._rows(part):
                yield from rows.ids.split(size)

    def removed_batches(self, size: int) -> Iterator[Tensor]:
        size = integer("removed_batches: size", size, least=1)
        for part in self._saved.first_parts:
            for ids in self._records(part, ERASE, lambda of: checked_ids(self.name, of)):
                yield from ids.split(size)

    def counts(self, size: int) -> Iterator[CountedIds]:
        size = integer("counts: size", size, least=1)
        for part in self._saved.first_parts:
            for counted in self._records(part, COUNTS, lambda of: checked_counts(self.name, of)):
                yield from (CountedIds(*some) for some in counted.split(size, dim=1))

    def sketches(self, parts: Sequence[SavedPart]) -> list[Tensor]:
        return [
            cells
            for part in parts
            for cells in self._records(part, SKETCH, lambda of: checked_sketch(self.name, of))
        ]


__all__ = ["ChangedTable", "ChangesFile", "changes_of"]
