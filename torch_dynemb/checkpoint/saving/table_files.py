"""Files of the tables of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.checkpoint.file_names import counts_file, group_file, rows_file, sketch_file
from torch_dynemb.checkpoint.manifest.records import SavedGroup
from torch_dynemb.files.checksummed_files import (
    ChecksummedWriter,
    space_errors,
)
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location
from torch_dynemb.files.scattered_file import ScatteredFile
from torch_dynemb.files.tensor_file import TensorShape
from torch_dynemb.files.uploads import limits_of
from torch_dynemb.ops.columns import SKETCH_ROWS, Table
from torch_dynemb.parts.saved_tables import (
    SavedFile,
    SavedPart,
    SavedTable,
    described_table,
)
from torch_dynemb.rows.read import RowOrder, RowReader, occupied_slots
from torch_dynemb.rows.sketches import sketch_cells
from torch_dynemb.rows.source import GroupSource
from torch_dynemb.rows.tensor_names import (
    COUNT,
    ID,
    SKETCH,
    WEIGHT,
    score_entry,
    state_entry,
)
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.shards import IdSlots

FILE_BYTES = 2 << 30
PIECE_BYTES = 8 << 20  # that are copied from a GPU at once
_MOST_ENDED = 32  # most files that are open at once
Progress = Callable[[int], object]


class SourcePart(NamedTuple):
    """A part of a table that this rank saves.

    Attributes:
        name: name of the table.
        number: number of the table in its group.
        columns: columns of the part within the whole table.
        ids: ids that it owns.
        embedding_dim: columns of the whole table.
        dtype: dtype of the rows, as the manifest names it.
        optimized: whether its rows have an optimizer.
    """

    name: str
    number: int
    columns: range
    ids: IdSlots
    embedding_dim: int
    dtype: str
    optimized: bool

    @property
    def split(self) -> bool:
        """Whether other parts have other columns of its ids."""
        return len(self.columns) < self.embedding_dim


@dataclass(frozen=True)
class Folder:
    """Destination of a rank's files; as a context, it syncs them to the disk at the end.

    Attributes:
        disk: the file system.
        path: path of the unfinished checkpoint.
        rank, ranks: rank that writes, and number of ranks.
        progress: called with the number of bytes written.
    """

    disk: Disk
    path: Location
    rank: int = 0
    ranks: int = 1
    progress: Progress | None = None
    _ended: list[ChecksummedWriter | ScatteredFile] = field(
        default_factory=list
    )  # written, but perhaps not on the disk yet

    def create(self, name: str, tensors: Sequence[TensorShape]) -> ScatteredFile:
        """Create a file of tensors.

        Args:
            name: path in the checkpoint.
            tensors: its tensors, in order.
        """
        return ScatteredFile(self.disk, self._made(name), tensors, self.progress)

    def write(self, name: str, tensors: Mapping[str, Tensor], rows: int) -> SavedFile:
        """Write a file of whole tensors of any device.

        Args:
            name: path in the checkpoint.
            tensors: its tensors by name, in order.
            rows: number of rows for the manifest.
        """
        shapes = [TensorShape(of, each.dtype, tuple(each.shape)) for of, each in tensors.items()]
        with self.create(name, shapes) as file:
            for of, values in tensors.items():
                for piece in _on_host(values.detach()):
                    file.append(of, piece)
            return self.saved(name, file, rows)

    def write_pieces(self, name: str, pieces: Iterable[Tensor], rows: int) -> SavedFile:
        """Write a file of consecutive pieces of bytes.

        Args:
            name: path in the checkpoint.
            pieces: contiguous CPU tensors.
            rows: number of rows for the manifest.
        """
        writer = ChecksummedWriter(self.disk, self._made(name))
        try:
            for piece in pieces:
                writer.write(piece)
                if self.progress is not None:
                    self.progress(piece.numel() * piece.element_size())
            return self.saved(name, writer, rows)
        except BaseException:
            writer.close()
            raise

    def saved(self, name: str, file: ChecksummedWriter | ScatteredFile, rows: int) -> SavedFile:
        """End a file, and sync older files to the disk. Return its manifest entry."""
        sums = file.end()
        self._ended.append(file)
        if len(self._ended) > _MOST_ENDED:
            self._ended.pop(0).sync()
        within = f"{self.path.name}/{name}"
        return SavedFile(within, rows, sums.bytes, sums.block_bytes, list(sums.sums))

    def _made(self, name: str) -> Location:
        """Return the path of a file, after its folder was created."""
        path = self.path / name
        with space_errors(path.parent):
            self.disk.make_folder(path.parent)
        return path

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            while error is None and self._ended:
                self._ended[0].sync()
                del self._ended[0]
        finally:
            for writer in self._ended:
                writer.close()


def _on_host(values: Tensor) -> Iterator[Tensor]:
    """Yield a tensor as contiguous CPU tensors; without a copy if it is one."""
    if values.dim() == 0 or (values.device.type == "cpu" and values.is_contiguous()):
        yield values.cpu()
        return
    step = max(1, PIECE_BYTES // max(1, values[:1].numel() * values.element_size()))
    for piece in values.split(step):
        yield piece.cpu().contiguous()


class RowsShape(NamedTuple):
    """Tensors of the rows of a part.

    Attributes:
        table: name of the table.
        part, parts: number of the part, and number of parts with the same columns.
        columns: columns of the part within the whole table.
        ids: number of ids.
        scores: names of the scores.
        weights: weights of one row.
        state: optimizer state of one row, by name.
    """

    table: str
    part: int
    parts: int
    columns: range
    ids: int
    scores: Sequence[str]
    weights: TensorShape
    state: Mapping[str, TensorShape]

    @staticmethod
    def of_saved(
        table: str, saved: SavedTable, part: int, parts: int, columns: range, ids: int
    ) -> RowsShape:
        """Return the tensors of a part of a table with a manifest entry.

        Args:
            table, part, parts, columns, ids: see the attributes.
            saved: entry of the table.
        """
        width = len(columns)
        weights = TensorShape(WEIGHT, saved.column_dtype, (1, width))
        state = {
            of.name: TensorShape(state_entry(of.name), of.dtype, (1, of.columns(width)))
            for of in saved.state_tensors
        }
        return RowsShape(table, part, parts, columns, ids, saved.scores, weights, state)

    def tensors(self, rows: int) -> list[TensorShape]:
        """Return the tensors of a file; only the first columns have ids and scores.

        Args:
            rows: number of rows of the file.
        """
        of_ids = [ID, *map(score_entry, self.scores)] if self.columns.start == 0 else []
        shapes = [TensorShape(name, torch.int64, (rows,)) for name in of_ids]
        for of in (self.weights, *self.state.values()):
            shapes.append(of._replace(shape=(rows, *of.shape[1:])))
        return shapes


class PartWriter:
    """Writer of the rows of a part into files of bounded size.

    Args:
        folder: destination.
        shape: tensors of the part.

    Attributes:
        shape: as given.
        files: manifest entries of the finished files.
        ids_crc32c: checksum of the written ids.
    """

    def __init__(self, folder: Folder, shape: RowsShape) -> None:
        self._folder, self.shape = folder, shape
        self.files: list[SavedFile] = []
        self.ids_crc32c = 0
        row_bytes = sum([of.bytes for of in shape.tensors(1)])
        most = min(FILE_BYTES, limits_of(folder.disk).file_bytes)
        self._most = max(1, most // max(1, row_bytes))
        self._file: ScatteredFile | None = None
        self._name = ""
        self._names: list[str] = []  # of the tensors
        self._rows = self._left = 0  # rows of the file, and those not written yet
        self._done = 0  # rows that are written

    def room(self, rows: int) -> list[Tensor | None]:
        """Return memory for the weights and each state tensor of the next rows, if there is any.

        Args:
            rows: their number.
        """
        file = self._file or self._next_file()
        values = self._names[-1 - len(self.shape.state) :]
        if rows > self._left:
            return [None] * len(values)
        return [file.room(name, rows) for name in values]

    def append(self, batch: RowBatch) -> None:
        """Write the next rows.

        Args:
            batch: rows of the part, with its state and scores; contiguous, on the CPU.

        Raises:
            OSError: the disk is full, or fails.
        """
        self.ids_crc32c = ops.crc32c(batch.ids, self.ids_crc32c)
        shape, begin, count = self.shape, 0, batch.ids.numel()
        tensors = [batch.rows, *(batch.state[name] for name in shape.state)]
        if shape.columns.start == 0:
            tensors = [batch.ids, *(batch.scores[name] for name in shape.scores), *tensors]
        self._done += count
        if self._done > shape.ids:
            raise self._miscounted()
        while begin < count:
            file = self._file or self._next_file()
            end = min(count, begin + self._left)
            for name, values in zip(self._names, tensors, strict=True):
                file.append(name, values if end - begin == count else values[begin:end])
            self._left -= end - begin
            begin = end
            if self._left == 0:
                self._end_file()

    def _next_file(self) -> ScatteredFile:
        shape = self.shape
        before = sum(file.rows for file in self.files)
        self._rows = self._left = min(self._most, shape.ids - before)
        self._name = rows_file(shape.table, shape.part, shape.parts, shape.columns, len(self.files))
        tensors = shape.tensors(self._rows)
        self._names = [of.name for of in tensors]
        self._file = self._folder.create(self._name, tensors)
        return self._file

    def _end_file(self) -> None:
        assert self._file is not None
        self.files.append(self._folder.saved(self._name, self._file, self._rows))
        self._file = None

    def finish(self) -> None:
        """Finish the part. A part without ids has one file without rows."""
        if self._file is not None and self._rows == 0:
            self._end_file()
        if self._done != self.shape.ids:
            raise self._miscounted()

    def _miscounted(self) -> RuntimeError:
        return RuntimeError(
            f"checkpoint: part {self.shape.part} of table {self.shape.table!r} has {self._done} "
            f"rows, expected {self.shape.ids}: the tables changed while they were saved"
        )

    def __enter__(self) -> PartWriter:
        self._next_file()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Finish the part, or close the file that is open after an error."""
        try:
            if error is None:
                self.finish()
        finally:
            if self._file is not None:
                self._file.close()


# -- tables of a group ---------------------------------------------------------------------------


def write_group(
    folder: Folder, source: GroupSource, parts: Sequence[SourcePart], number: int
) -> tuple[SavedGroup, list[tuple[str, SavedTable]]]:
    """Write the saved tables of a group. Return its manifest entry, and those of its tables.

    Args:
        folder: destination.
        source: state of the group.
        parts: saved parts of it.
        number: number of the group on this rank.
    """
    slabs = [source.config.slab_of(part.number) for part in parts]
    saved: dict[int, SavedPart] = {}
    for slab in sorted(set(slabs)):
        order = RowOrder(source, slab)
        for of_slab, part in zip(slabs, parts, strict=True):
            if of_slab == slab:
                saved[part.number] = _write_part(folder, source, part, order, number)
    file = folder.write(group_file(folder.rank, folder.ranks, number), source.entries, 0)
    words = list(source.config.layout.score_words)
    stored = [t for t, table in enumerate(source.config.tables) if table.slab.tiered]
    group = SavedGroup(folder.rank, [part.name for part in parts], words, file, stored)
    tables = [
        described_table(
            source.config,
            part.number,
            saved[part.number],
            embedding_dim=part.embedding_dim,
            dtype=part.dtype,
            optimized=part.optimized,
            seeds=source.entries["seeds"],
            hyper=source.hyper,
            clock=source.entries["clock"],
            now=source.now,
        )
        for part in parts
    ]
    return group, [(part.name, table) for part, table in zip(parts, tables, strict=True)]


def _write_part(
    folder: Folder, source: GroupSource, part: SourcePart, order: RowOrder, group: int
) -> SavedPart:
    number, config = part.number, source.config
    # ranks with other columns of the same ids must write them in the same order
    reader = RowReader(source, number, order, by_id=part.split)
    slab = source.slabs[config.slab_of(number)]
    shape = RowsShape(
        part.name,
        folder.rank,
        folder.ranks,
        part.columns,
        reader.count,
        # also scores that only other tables of the group keep: a step writes them for all ids
        config.layout.score_words,
        _of_a_row(WEIGHT, slab.weights),
        {name: _of_a_row(state_entry(name), values) for name, values in slab.state.items()},
    )
    with PartWriter(folder, shape) as writer:
        for batch in reader.batches(range(reader.count), writer.room):
            writer.append(batch)
    counts, counted = _write_counts(folder, source, part)
    sketch, width = _write_sketch(folder, source, part)
    return SavedPart(
        rank=folder.rank,
        first_column=part.columns.start,
        columns=len(part.columns),
        slots_begin=part.ids.begin,
        slots_end=part.ids.end,
        slots=part.ids.slots,
        ids=reader.count,
        ids_crc32c=writer.ids_crc32c if part.split else 0,
        group=group,
        number=number,
        counters=source.tables[number].tolist(),
        optimizer_steps=int(source.entries["row_clock"][number]),
        rows=writer.files,
        counts=counts,
        counted=counted,
        sketch=sketch,
        sketch_width=width,
    )


def _of_a_row(name: str, values: Tensor) -> TensorShape:
    return TensorShape(name, values.dtype, (1, values.shape[1]))


def _write_counts(
    folder: Folder, source: GroupSource, part: SourcePart
) -> tuple[SavedFile | None, int]:
    """Write the ids that wait for admission; only the part with the first columns has them."""
    counters = source.config.layout.counters[part.number]
    if counters is None or part.columns.start > 0:
        return None, 0
    count = int(source.tables[counters, Table.SIZE])
    name = counts_file(part.name, folder.rank, folder.ranks, part.columns)
    shapes = [TensorShape(of, torch.int64, (count,)) for of in (ID, COUNT)]
    with folder.create(name, shapes) as file:
        for piece in occupied_slots(source.entries[f"{source.config.names[part.number]}.counts"]):
            file.append(ID, piece.ids)
            file.append(COUNT, piece.stored)
        return folder.saved(name, file, count), count


def _write_sketch(
    folder: Folder, source: GroupSource, part: SourcePart
) -> tuple[SavedFile | None, int]:
    cells = sketch_cells(source.config, source.entries["sketch"], part.number)
    if cells is None or part.columns.start > 0:
        return None, 0
    name = sketch_file(part.name, folder.rank, folder.ranks)
    return folder.write(name, {SKETCH: cells}, SKETCH_ROWS), cells.shape[1]


__all__ = [
    "Folder",
    "PartWriter",
    "Progress",
    "RowsShape",
    "SourcePart",
    "write_group",
]
