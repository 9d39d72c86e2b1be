"""Resharding: rewrites a checkpoint as another number of ranks would save it."""

from __future__ import annotations

import uuid as uuids
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import integer
from torch_dynemb.checkpoint.file_names import FULL, counts_file, sketch_file
from torch_dynemb.checkpoint.manifest.file import check_full
from torch_dynemb.checkpoint.manifest.records import Manifest
from torch_dynemb.checkpoint.reading.reader import Checkpoint
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.checkpoint.reading.saved_rows import PIECE_BYTES
from torch_dynemb.checkpoint.reading.saved_table import CheckpointTable
from torch_dynemb.checkpoint.saving.save import finish_folder
from torch_dynemb.checkpoint.saving.table_files import Folder, PartWriter, RowsShape
from torch_dynemb.console.progress import progress_bar
from torch_dynemb.distributed.owners import slots_of
from torch_dynemb.files.checksummed_files import ChecksummedReader
from torch_dynemb.files.commit import abandon, claimed, is_taken, new_files
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location, checked_location
from torch_dynemb.files.tensor_file import TensorShape
from torch_dynemb.files.uploads import disk_of, limits_of
from torch_dynemb.ops.columns import SKETCH_ROWS, TABLE_COLUMNS, Table
from torch_dynemb.parts.saved_tables import NO_GROUP, SavedFile, SavedPart, SavedTable
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.process.torch_modes import plain_torch
from torch_dynemb.rows.sketches import combined_sketch
from torch_dynemb.rows.tensor_names import COUNT, ID, SKETCH
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.shards import IdSlots

_DISK = Disk()
_FILES_AT_ONCE = 256  # open files; more parts take several passes
_IDS_AT_ONCE = 1 << 18
_COLUMNS_TOGETHER = 4  # the columns of a shard are a multiple of this
_COUNTERS = slice(Table.INSERTED, Table.DEFAULT_SERVED + 1)

Batch = TypeVar("Batch")


class Split(NamedTuple):
    """Assignment of a table to parts.

    Attributes:
        table: table to read.
        saved: its manifest entry.
        ids: ids of each part.
        columns: columns of each column shard.
    """

    table: CheckpointTable
    saved: SavedTable
    ids: list[IdSlots]
    columns: list[range]

    @property
    def slots(self) -> int:
        """Number of slots that ids are assigned to."""
        return self.ids[0].slots

    def owners(self, ids: Tensor) -> Tensor:
        """Return the part of each id."""
        return ops.id_owners(ids, parts=len(self.ids), slots=self.slots)


@plain_torch()
def reshard(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    parts: int,
    columns: int | None = None,
    slots: int | None = None,
    progress: bool | None = None,
) -> None:
    """Rewrite a checkpoint as another number of ranks would save it, with the same content.

    That number of ranks, with tables sharded by rows, then reads only its own files. Places of ids
    and rows are lost: a load gives every id its row, but at a new place. It takes a few blocks of
    memory, for tables of any size, and needs no ranks.

    Admission counts go to the part of their id. Sketches cannot be split: parts share one if their
    ids shared one before, and it is the sum of the saved ones.

    Args:
        path: path of the checkpoint.
        out: path or URL of the new checkpoint. It must not exist, and appears as a whole or not
            at all.
        parts: number of ranks that will load it. Ids are assigned to as many parts by
            :func:`torch_dynemb.ops.id_owners`.
        columns: most column shards of each part, with multiples of 4 columns; 1: whole rows;
            default: as saved. 8-bit state has to stay as saved.
        slots: number of slots that ids are assigned to, at least ``parts``; default: ``parts``, or
            as saved if the parts shared a larger number of slots, as RecIS's engine does.
        progress: show a progress bar; default: if the standard error is a terminal.

    Raises:
        TypeError, ValueError: a wrong argument.
        FileNotFoundError: ``path`` is not a checkpoint.
        FileExistsError: ``out`` exists.
        DamagedFileError: a file is damaged or missing.
        OSError: the disk is full, or fails. In all cases nothing is left at ``out``.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> items = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
        >>> items(torch.arange(100)).sum().backward()
        >>> folder = tempfile.TemporaryDirectory()
        >>> handle = td.checkpoint.save(folder.name + "/last", items)
        >>> td.checkpoint.reshard(folder.name + "/last", folder.name + "/four", parts=4)
        >>> td.checkpoint.open(folder.name + "/four").tables["embedding"].ids
        100
        >>> folder.cleanup()
    """
    parts = integer("reshard: parts", parts, least=1)
    columns = None if columns is None else integer("reshard: columns", columns, least=1)
    slots = None if slots is None else integer("reshard: slots", slots, least=parts)
    target = checked_location("reshard", out)
    with open_checkpoint(path) as source:
        check_full("reshard", source.folder, source.manifest)
        splits = {
            name: split_of(table, source.manifest.tables[name], parts, columns, slots)
            for name, table in source.tables.items()
        }
        write_parts("resharding", source, target, splits, parts, progress)


# -- assignment ----------------------------------------------------------------------------------


def split_of(
    table: CheckpointTable, saved: SavedTable, parts: int, columns: int | None, slots: int | None
) -> Split:
    """Assign a table to parts.

    Args:
        table: table to read.
        saved: its manifest entry.
        parts, columns, slots: see :func:`reshard`.

    Raises:
        ValueError: its 8-bit state does not allow these columns.
    """
    if slots is None:
        before = saved.parts[0].slots
        # ranks that share a number of slots keep it, for any number of ranks
        shared = before > len(saved.first_parts) and before >= parts
        slots = before if shared else parts
    ranges = [slots_of(part, parts, slots) for part in range(parts)]
    ids = [IdSlots(of.start, of.stop, slots) for of in ranges]
    as_saved = sorted({(part.first_column, part.columns) for part in saved.parts})
    kept = [range(first, first + count) for first, count in as_saved]
    wanted = kept if columns is None else _column_shards(table.embedding_dim, columns)
    blocks = [of.name for of in table.state_tensors if of.dtype == torch.uint8]
    if blocks and wanted != kept:
        raise ValueError(
            f"reshard: columns is {columns}, but table {table.name!r} was saved with 8-bit "
            f"{blocks[0]} of columns {[(of.start, of.stop) for of in kept]}, which cannot "
            "be split or combined: leave columns out"
        )
    return Split(table, saved, ids, wanted)


def _column_shards(dim: int, most: int) -> list[range]:
    """Split columns into nearly equal ranges, of multiples of 4 if possible."""
    groups = -(-dim // _COLUMNS_TOGETHER)
    shards = [slots_of(k, min(most, groups), groups) for k in range(min(most, groups))]
    return [
        range(of.start * _COLUMNS_TOGETHER, min(dim, of.stop * _COLUMNS_TOGETHER)) for of in shards
    ]


def _state_columns(table: CheckpointTable, shards: Sequence[range]) -> list[dict[str, slice]]:
    """Return, by shard and state tensor, the slice of a whole row's state that the shard has."""
    result: list[dict[str, slice]] = [{} for _ in shards]
    for tensor in table.state_tensors:
        begin = 0
        for shard, of_shard in zip(shards, result, strict=True):
            end = begin + tensor.columns(len(shard))
            of_shard[tensor.name] = slice(begin, end)
            begin = end
    return result


# -- writing -------------------------------------------------------------------------------------


def write_parts(
    doing: str,
    source: Checkpoint,
    target: Location,
    splits: Mapping[str, Split],
    parts: int,
    progress: bool | None,
) -> None:
    """Write a checkpoint as a number of ranks would save it.

    Args:
        doing: label of the progress bar.
        source: checkpoint from which the dense state is copied.
        target: path of the new checkpoint.
        splits: assignments of the tables, by name.
        parts: number of ranks.
        progress: show a progress bar.

    Raises:
        FileExistsError: ``target`` exists.
        DamagedFileError: a file is damaged or missing.
        OSError: the disk is full, or fails. In all cases nothing is left of it.
    """
    _check_absent(target)
    uuid, disk = uuids.uuid4().hex, disk_of(target, _DISK)
    files_of_dense = [*source.manifest.dense.files, *source.manifest.state.files]
    total = sum(split.table.ids * split.table.row_bytes for split in splits.values())
    total += sum(file.bytes for file in files_of_dense)
    with claimed("checkpoint.save", disk, target, uuid):
        try:
            disk.make_folder(new_files(target, uuid))
            with (
                progress_bar(f"{doing} {source.folder.name}", total, progress) as bar,
                Folder(disk, new_files(target, uuid), progress=bar.update) as to,
            ):
                tables = {name: _write_table(to, split) for name, split in splits.items()}
                copied = {file.path: _copy(source.folder, to, file) for file in files_of_dense}
            dense, state = (
                replace(of, files=[copied[file.path] for file in of.files])
                for of in (source.manifest.dense, source.manifest.state)
            )
        except BaseException:
            with defer_signals():
                abandon(disk, target, uuid)
            raise
        manifest = Manifest(uuid, FULL, None, parts, tables, [], dense, state)
        finish_folder(disk, target, manifest, _check_absent)


def _check_absent(path: Location) -> None:
    if is_taken(path):
        raise FileExistsError(f"{path} exists already: give another path")


def _copy(source: Location, folder: Folder, file: SavedFile) -> SavedFile:
    """Copy a file, block by block. Return its manifest entry."""

    def blocks(reader: ChecksummedReader) -> Iterator[Tensor]:
        for number in range(len(file.crc32c)):
            size = min(file.block_bytes, file.bytes - number * file.block_bytes)
            block = torch.empty(size, dtype=torch.uint8, device="cpu")
            reader.read_block(number, block)
            yield block

    reader = ChecksummedReader(source / file.path, file.sums)
    try:
        name = "/".join(file.path.split("/")[-2:])  # without the prefix of a URL
        return folder.write_pieces(name, blocks(reader), file.rows)
    finally:
        reader.close()


def _write_table(folder: Folder, split: Split) -> SavedTable:
    saved, parts = split.saved, len(split.ids)
    rows = _write_rows(folder, split)
    counts = _write_counts(folder, split)
    sketches = _write_sketches(folder, split)
    # event counters of the table are not divided by ids
    happened = torch.tensor([part.counters for part in saved.first_parts], device="cpu").sum(0)[
        _COUNTERS
    ]
    written = []
    for writer in rows:
        part, ids = writer.shape, split.ids[writer.shape.part]
        counters = torch.zeros(TABLE_COLUMNS, dtype=torch.int64, device="cpu")
        if part.part == 0:
            counters[_COUNTERS] = happened
        first = part.columns.start == 0
        sketch = sketches.get(part.part) if first else None
        written.append(
            SavedPart(
                rank=part.part,
                first_column=part.columns.start,
                columns=len(part.columns),
                slots_begin=ids.begin,
                slots_end=ids.end,
                slots=ids.slots,
                ids=part.ids,
                ids_crc32c=writer.ids_crc32c if len(split.columns) > 1 else 0,
                group=NO_GROUP,
                number=0,
                counters=counters.tolist(),
                optimizer_steps=max(of.optimizer_steps for of in saved.parts),
                rows=writer.files,
                counts=counts[part.part] if counts and first else None,
                counted=counts[part.part].rows if counts and first else 0,
                sketch=None if sketch is None else sketch[0],
                sketch_width=0 if sketch is None else sketch[1],
            )
        )
    written.sort(key=lambda part: (part.first_column, part.slots_begin))
    assert len(written) == parts * len(split.columns)
    return replace(saved, parts=written)


def _write_rows(folder: Folder, split: Split) -> list[PartWriter]:
    """Write all rows, in one pass or in several if there are many parts."""
    table, parts = split.table, len(split.ids)
    sizes = _sizes(split, table.id_batches(_IDS_AT_ONCE))
    of_state = _state_columns(table, split.columns)
    shards = list(zip(split.columns, of_state, strict=True))
    at_once = max(1, min(_FILES_AT_ONCE, limits_of(folder.disk).open_files) // len(shards))
    done: list[PartWriter] = []
    for begin in range(0, parts, at_once):
        numbers = range(begin, min(begin + at_once, parts))
        with ExitStack() as stack:
            writers: dict[int, list[_ShardWriter]] = {}
            for number in numbers:
                writers[number] = []
                for columns, state in shards:
                    shape = RowsShape.of_saved(
                        table.name, split.saved, number, parts, columns, sizes[number]
                    )
                    writer = stack.enter_context(PartWriter(folder, shape))
                    writers[number].append(_ShardWriter(writer, columns, state))
                    done.append(writer)
            size = max(1, PIECE_BYTES // table.row_bytes)
            for batch in table.batches_by_shard(size, split.columns):
                for number, places in _dealt(split.owners(batch.ids), numbers):
                    for of in writers[number]:
                        of.append(batch, places)
    return done


class _ShardWriter(NamedTuple):
    """Writer of some columns of rows.

    Attributes:
        writer: their writer.
        columns: columns within the whole table.
        state: by state tensor, the slice of a whole row's state; for one value per row, of the
            values of all column shards.
    """

    writer: PartWriter
    columns: range
    state: Mapping[str, slice]

    def append(self, batch: RowBatch, places: Tensor) -> None:
        """Write some of the whole rows of a batch.

        Args:
            batch: whole rows, with all scores and all state, by shard.
            places: int64 [n], positions of the rows in the batch.
        """
        columns = slice(self.columns.start, self.columns.stop)
        state = {name: values[:, self.state[name]] for name, values in batch.state.items()}
        shard = batch._replace(rows=batch.rows[:, columns], state=state)
        self.writer.append(shard.each(lambda values: values.index_select(0, places)))


def _sizes(split: Split, batches: Iterable[Tensor]) -> list[int]:
    """Count the ids of each part."""
    counts = torch.zeros(len(split.ids), dtype=torch.int64, device="cpu")
    for ids in batches:
        counts += torch.bincount(split.owners(ids), minlength=len(split.ids))
    return [int(count) for count in counts]


def _dealt(owners: Tensor, numbers: range) -> Iterator[tuple[int, Tensor]]:
    """Split a batch by part: positions of the ids of each part."""
    order = torch.argsort(owners, stable=True)
    bounds = torch.searchsorted(
        owners[order], torch.arange(numbers.start, numbers.stop + 1, device="cpu")
    )
    for number, (begin, end) in zip(
        numbers, zip(bounds.tolist(), bounds[1:].tolist(), strict=False), strict=True
    ):
        if begin < end:
            yield number, order[begin:end]


def _write_counts(folder: Folder, split: Split) -> list[SavedFile]:
    """Write the ids that wait for admission, in one file per part; none if they are not counted."""
    table, parts = split.table, len(split.ids)
    if not table.counts_ids:
        return []
    sizes = _sizes(split, (of.ids for of in table.counts(_IDS_AT_ONCE)))
    first = range(table.embedding_dim)
    names = [counts_file(table.name, number, parts, first) for number in range(parts)]
    written: list[SavedFile] = []
    at_once = min(_FILES_AT_ONCE, limits_of(folder.disk).open_files)
    for begin in range(0, parts, at_once):
        numbers = range(begin, min(begin + at_once, parts))
        with ExitStack() as stack:
            opened = {}
            for number in numbers:
                tensors = [TensorShape(of, torch.int64, (sizes[number],)) for of in (ID, COUNT)]
                opened[number] = stack.enter_context(folder.create(names[number], tensors))
            for batch in table.counts(_IDS_AT_ONCE):
                for number, places in _dealt(split.owners(batch.ids), numbers):
                    opened[number].append(ID, batch.ids[places])
                    opened[number].append(COUNT, batch.counts[places])
            for number, file in opened.items():
                written.append(folder.saved(names[number], file, sizes[number]))
    return written


def _write_sketches(folder: Folder, split: Split) -> dict[int, tuple[SavedFile, int]]:
    """Write the sketches. Return the file of each part, which parts may share, and its width."""
    sources = [part for part in split.saved.first_parts if part.sketch_width > 0]
    together: list[tuple[set[int], set[int]]] = []  # new parts, and the sources of their ids
    for number, ids in enumerate(split.ids):
        parts = {number}
        needed = {k for k, part in enumerate(sources) if part.id_slots.shares(ids)}
        for other in [of for of in together if of[1] & needed]:
            together.remove(other)
            parts |= other[0]
            needed |= other[1]
        together.append((parts, needed))
    result = {}
    for parts, needed in together:
        found = split.table.sketches([sources[k] for k in sorted(needed)])
        if not found:
            continue
        cells = combined_sketch(found, max(of.shape[1] for of in found))
        name = sketch_file(split.table.name, min(parts), len(split.ids))
        file = folder.write(name, {SKETCH: cells}, SKETCH_ROWS)
        result.update(dict.fromkeys(parts, (file, cells.shape[1])))
    return result


__all__ = ["Split", "reshard", "split_of", "write_parts"]
