"""Files of the tables of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.checkpoint.file_names import counts_file, group_file, rows_file, sketch_file
from torch_dynemb.checkpoint.manifest.records import SavedGroup
from torch_dynemb.checkpoint.saving.row_order import (
    RowOrder,
    occupied_slots,
)
from torch_dynemb.checkpoint.saving.source import GroupSource
from torch_dynemb.checkpoint.saving.table_source import PIECE_BYTES, RoomForRows, TableSource
from torch_dynemb.files.checksummed_files import (
    ChecksummedWriter,
    FileChecksums,
    space_errors,
)
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location
from torch_dynemb.files.scattered_file import ScatteredFile
from torch_dynemb.files.tensor_file import TensorShape, header_of
from torch_dynemb.files.uploads import limits_of
from torch_dynemb.ops.columns import SKETCH_ROWS, Table
from torch_dynemb.parts.saved_tables import SavedFile, SavedPart
from torch_dynemb.parts.sketches import sketch_cells
from torch_dynemb.rows.tensor_names import COUNT, ID, SKETCH, WEIGHT, score_entry, state_entry
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.shards import IdSlots

FILE_BYTES = 2 << 30
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


class Section(NamedTuple):
    """A tensor of a file, and a function that yields the values of a range of its rows."""

    shape: TensorShape
    pieces: Callable[[range], Iterator[Tensor]]

    @staticmethod
    def of(name: str, values: Tensor) -> Section:
        """Make a section of a whole tensor of any device, written piece by piece.

        Args:
            name: name of the tensor.
            values: the tensor.
        """
        step = max(1, PIECE_BYTES // max(1, values[:1].numel() * values.element_size()))
        shape = TensorShape(name, values.dtype, tuple(values.shape))
        pieces = values.detach().split(step)
        return Section(shape, lambda _: (piece.cpu().contiguous() for piece in pieces))

    @property
    def rows(self) -> int:
        """Size of the first dimension."""
        return self.shape.shape[0] if self.shape.shape else 1


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
    rank: int
    ranks: int
    progress: Progress
    _ended: list[ChecksummedWriter | ScatteredFile] = field(
        default_factory=list
    )  # written, but perhaps not on the disk yet

    def write(self, name: str, sections: Sequence[Section], rows: int) -> SavedFile:
        """Write a file.

        Args:
            name: path in the checkpoint.
            sections: tensors, in order.
            rows: number of rows for the manifest.
        """

        def pieces() -> Iterator[Tensor]:
            header = header_of([section.shape for section in sections])
            yield torch.frombuffer(bytearray(header), dtype=torch.uint8)
            for section in sections:
                written = 0
                for piece in section.pieces(range(section.rows)):
                    yield piece
                    written += piece.numel() * piece.element_size()
                if written != section.shape.bytes:
                    raise RuntimeError(
                        f"checkpoint: {section.shape.name!r} of {name} has {written} bytes, "
                        f"expected {section.shape.bytes}: the tables changed while they were saved"
                    )

        return self.write_pieces(name, pieces(), rows)

    def write_pieces(self, name: str, pieces: Iterator[Tensor], rows: int) -> SavedFile:
        """Write a file of consecutive pieces of bytes.

        Args:
            name: path in the checkpoint.
            pieces: contiguous CPU tensors.
            rows: number of rows for the manifest.
        """
        path = self.path / name
        with space_errors(path.parent):
            self.disk.make_folder(path.parent)
        writer = ChecksummedWriter(self.disk, path)
        try:
            for piece in pieces:
                writer.write(piece)
                self.progress(piece.numel() * piece.element_size())
            sums = writer.end()
        except BaseException:
            writer.close()
            raise
        return self._file(name, rows, writer, sums)

    def write_rows(
        self,
        name: str,
        sections: Sequence[Section],
        values: Sequence[TensorShape],
        pieces: Callable[[RoomForRows], Iterator[RowBatch]],
        rows: int,
    ) -> SavedFile:
        """Write a file of rows with weights and state that are read together.

        Args:
            name: path in the checkpoint.
            sections: its first tensors, in order.
            values: the weights and each state tensor, which follow.
            pieces: yields the rows; see :meth:`TableSource.rows_and_state`. They are written first,
                because training may wait for them.
            rows: number of rows.
        """
        path = self.path / name
        with space_errors(path.parent):
            self.disk.make_folder(path.parent)
        shapes = [section.shape for section in sections]
        file = ScatteredFile(self.disk, path, [*shapes, *values])
        try:
            for piece in pieces(lambda count: [file.room(of.name, count) for of in values]):
                tensors = (piece.rows, *piece.state.values())
                for shape, tensor in zip(values, tensors, strict=True):
                    file.append(shape.name, tensor)
                    self.progress(tensor.numel() * tensor.element_size())
            for section in sections:
                for tensor in section.pieces(range(section.rows)):
                    file.append(section.shape.name, tensor)
                    self.progress(tensor.numel() * tensor.element_size())
            sums = file.end()
        except BaseException:
            file.close()
            raise
        return self._file(name, rows, file, sums)

    def _file(
        self, name: str, rows: int, writer: ChecksummedWriter | ScatteredFile, sums: FileChecksums
    ) -> SavedFile:
        """Return the manifest entry of a written file, and sync older files to the disk."""
        self._ended.append(writer)
        if len(self._ended) > _MOST_ENDED:
            self._ended.pop(0).sync()
        within = f"{self.path.name}/{name}"
        return SavedFile(within, rows, sums.bytes, sums.block_bytes, list(sums.sums))

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


def write_group(
    folder: Folder, source: GroupSource, parts: Sequence[SourcePart], number: int
) -> tuple[SavedGroup, list[SavedPart]]:
    """Write the saved tables of a group. Return its manifest entries.

    Args:
        folder: destination.
        source: state of the group.
        parts: saved parts of it.
        number: number of the group on this rank.
    """
    saved: dict[int, SavedPart] = {}
    for slab in range(len(source.slabs)):
        here = [part for part in parts if source.config.slab_of(part.number) == slab]
        if not here:
            continue
        order = RowOrder(source, slab)
        for part in here:
            saved[part.number] = _write_part(folder, source, part, order, number)
    sections = [Section.of(name, values) for name, values in source.entries.items()]
    file = folder.write(group_file(folder.rank, folder.ranks, number), sections, 0)
    words = list(source.config.layout.score_words)
    stored = [t for t, table in enumerate(source.config.tables) if table.slab.tiered]
    group = SavedGroup(folder.rank, [part.name for part in parts], words, file, stored)
    return group, [saved[part.number] for part in parts]


def _write_part(
    folder: Folder, source: GroupSource, part: SourcePart, order: RowOrder, group: int
) -> SavedPart:
    number = part.number
    # ranks with other columns of the same ids must write them in the same order
    table = TableSource(source, number, order, by_id=part.split)
    reader = source.slabs[source.config.slab_of(number)].reader
    sections = _id_sections(source, part, table)
    values = _value_sections(source, part, table)
    row_bytes = sum(of.shape.bytes for of in (*sections, *values)) // max(1, table.count)
    most = max(1, min(FILE_BYTES, limits_of(folder.disk).file_bytes) // max(1, row_bytes))
    starts = range(0, max(1, table.count), most)
    files = []
    for k, begin in enumerate(starts):
        rows = range(begin, min(begin + most, table.count))
        name = rows_file(part.name, folder.rank, folder.ranks, part.columns, k)
        of_file = [_rows_of(section, rows) for section in sections]
        of_values = [_rows_of(section, rows) for section in values]
        if reader is None:
            files.append(folder.write(name, [*of_file, *of_values], len(rows)))
        else:
            shapes = [section.shape for section in of_values]
            pieces = partial(table.rows_and_state, rows, reader)
            files.append(folder.write_rows(name, of_file, shapes, pieces, len(rows)))
    counts, counted = _write_counts(folder, source, part)
    sketch, width = _write_sketch(folder, source, part)
    return SavedPart(
        rank=folder.rank,
        first_column=part.columns.start,
        columns=len(part.columns),
        slots_begin=part.ids.begin,
        slots_end=part.ids.end,
        slots=part.ids.slots,
        ids=table.count,
        ids_crc32c=_ids_crc32c(table) if part.split else 0,
        group=group,
        number=number,
        counters=source.tables[number].tolist(),
        optimizer_steps=int(source.entries["row_clock"][number]),
        rows=files,
        counts=counts,
        counted=counted,
        sketch=sketch,
        sketch_width=width,
    )


def _ids_crc32c(table: TableSource) -> int:
    crc = 0
    for piece in table.ids(range(table.count)):
        crc = ops.crc32c(piece, crc)
    return crc


def _id_sections(source: GroupSource, part: SourcePart, table: TableSource) -> list[Section]:
    """Return the sections of a part's ids and scores; only the first columns have them."""
    if part.columns.start > 0:
        return []
    count = table.count
    sections = [Section(TensorShape(ID, torch.int64, (count,)), table.ids)]
    # also scores that only other tables of the group keep: a step writes them for all ids
    for word, name in enumerate(source.config.layout.score_words):
        shape = TensorShape(score_entry(name), torch.int64, (count,))
        sections.append(Section(shape, _scores(table, word)))
    return sections


def _value_sections(source: GroupSource, part: SourcePart, table: TableSource) -> list[Section]:
    """Return the sections of a part's weights and state."""
    count = table.count
    slab = source.slabs[source.config.slab_of(part.number)]
    weights = TensorShape(WEIGHT, slab.weights.dtype, (count, slab.weights.shape[1]))
    sections = [Section(weights, table.weights)]
    for name, tensor in slab.state.items():
        shape = TensorShape(state_entry(name), tensor.dtype, (count, *tensor.shape[1:]))
        sections.append(Section(shape, _state(table, name)))
    return sections


def _scores(table: TableSource, word: int) -> Callable[[range], Iterator[Tensor]]:
    return lambda rows: table.scores(rows, word)


def _state(table: TableSource, name: str) -> Callable[[range], Iterator[Tensor]]:
    return lambda rows: table.state(rows, name)


def _rows_of(section: Section, rows: range) -> Section:
    """Restrict a section to some rows."""
    shape = section.shape._replace(shape=(len(rows), *section.shape.shape[1:]))
    return Section(shape, lambda _: section.pieces(rows))


def _write_counts(
    folder: Folder, source: GroupSource, part: SourcePart
) -> tuple[SavedFile | None, int]:
    """Write the ids that wait for admission; only the part with the first columns has them."""
    counters = source.config.layout.counters[part.number]
    if counters is None or part.columns.start > 0:
        return None, 0
    buckets = source.entries[f"{source.config.names[part.number]}.counts"]
    count = int(source.tables[counters, Table.SIZE])

    def of(name: str, field: str) -> Section:
        shape = TensorShape(name, torch.int64, (count,))
        return Section(shape, lambda _: (getattr(of, field) for of in occupied_slots(buckets)))

    sections = [of(ID, "ids"), of(COUNT, "stored")]
    name = counts_file(part.name, folder.rank, folder.ranks, part.columns)
    return folder.write(name, sections, count), count


def _write_sketch(
    folder: Folder, source: GroupSource, part: SourcePart
) -> tuple[SavedFile | None, int]:
    cells = sketch_cells(source.config, source.entries["sketch"], part.number)
    if cells is None or part.columns.start > 0:
        return None, 0
    name = sketch_file(part.name, folder.rank, folder.ranks)
    return folder.write(name, [Section.of(SKETCH, cells)], SKETCH_ROWS), cells.shape[1]


__all__ = ["Folder", "Progress", "Section", "SourcePart", "write_group"]
