"""A table of a checkpoint: what is known of it, and its ids and rows in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torch_dynemb.argument_checks import flag, integer
from torch_dynemb.checkpoint.entries import COUNT, ID, SKETCH, WEIGHT, score_entry, state_entry
from torch_dynemb.checkpoint.manifest.records import SavedFile, SavedPart, SavedTable
from torch_dynemb.checkpoint.plain_torch import plain_torch
from torch_dynemb.checkpoint.reading.checked_rows import CheckedRows
from torch_dynemb.checkpoint.reading.column_shards import combined_by_row
from torch_dynemb.checkpoint.reading.sketches import combined_sketch
from torch_dynemb.ops.columns import SKETCH_ROWS
from torch_dynemb.optim.base import StateTensor
from torch_dynemb.table.content import CountedIds

Rows = TypeVar("Rows")


class SavedBatch(NamedTuple):
    """Some ids of a saved table, and what belongs to them.

    Attributes:
        ids: int64 [n].
        rows: [n, dim], in the dtype in which they were saved.
        state: optimizer state by name, [n] or [n, dim] each. 8-bit state is uint8 [n, bytes], as it
            was saved: where columns were split, the bytes of one shard after those of another.
        scores: int64 [n, words].
        score_names: of the words.
    """

    ids: Tensor
    rows: Tensor
    state: dict[str, Tensor]
    scores: Tensor
    score_names: tuple[str, ...]


class Closes(Protocol):
    """What is open while a checkpoint is read."""

    def close(self) -> None:
        """Closes it."""
        ...


Opened = TypeVar("Opened", bound=Closes)


class Opening(Protocol):
    """Has what is open closed with the checkpoint."""

    def __call__(self, rows: Opened, /) -> AbstractContextManager[Opened]:
        """For the time of a ``with``.

        Args:
            rows: what is open.
        """
        ...


class CheckpointFiles(NamedTuple):
    """Where a table's files are, and who closes them.

    Attributes:
        folder: of the checkpoint.
        opened: takes what is to be closed with the checkpoint, for the time of a ``with``.
    """

    folder: Path
    opened: Opening


class CheckpointTable:
    """A table of a checkpoint; :class:`Checkpoint` makes it.

    Args:
        name: of the table.
        saved: what the manifest says of it.
        files: where its files are.

    Attributes:
        name: of the table.
        embedding_dim: columns of its rows.
        dtype: of its rows.
        packed: its float32 columns are bits of something else: rows of 8 bits with a scale.
        ids: how many ids it has.
        counted: how many ids wait for admission.
        removed: of an increment, how many ids are gone since its parent.
        seed: from which initial values are drawn.
        padding_idx: the id that has no row; None: all ids may have one.
        optimizer: its name, and by state tensor name, whether it has one value for each row, and
            dtype; None: the table was not trained.
        hyper: hyper-parameters of the optimizer, as lists of numbers.
        scores: names of what is kept of an id.
        policy: score, capacity, what happens when it is full, admission and ttl.
        step, now: clock of the table.
    """

    def __init__(self, name: str, saved: SavedTable, files: CheckpointFiles) -> None:
        self._saved, self._files = saved, files
        self.name = name
        self.embedding_dim = saved.embedding_dim
        self.dtype, self.packed = saved.column_dtype, saved.packed
        self.ids = saved.ids
        self.counted = sum(part.counted for part in saved.first_parts)
        self.removed = sum(part.removed_ids for part in saved.first_parts)
        self.seed, self.padding_idx = saved.seed, saved.padding_idx
        self.optimizer: Mapping[str, Any] | None = saved.optimizer
        self.hyper: Mapping[str, Any] = saved.hyper
        self.scores = tuple(saved.scores)
        self.policy: Mapping[str, Any] = saved.policy
        self.step, self.now = saved.step, saved.now

    def __repr__(self) -> str:
        return (
            f"CheckpointTable({self.name!r}, ids={self.ids}, embedding_dim={self.embedding_dim}, "
            f"dtype={self.dtype})"
        )

    @property
    def state_tensors(self) -> tuple[StateTensor, ...]:
        """The tensors of optimizer state that were saved."""
        described = [] if self.optimizer is None else self.optimizer["state"]
        return tuple(
            StateTensor(name, per_row, getattr(torch, dtype)) for name, per_row, dtype in described
        )

    @property
    def counts_ids(self) -> bool:
        """Whether it counts the ids that wait for admission one by one."""
        return any(part.counts is not None for part in self._saved.first_parts)

    @property
    def row_bytes(self) -> int:
        """What an id takes with everything that belongs to it."""
        state = sum(tensor.row_bytes(self.embedding_dim) for tensor in self.state_tensors)
        return 8 + 8 * len(self.scores) + self.dtype.itemsize * self.embedding_dim + state

    def batches(
        self, size: int, *, state: bool = True, scores: bool = True
    ) -> Iterator[SavedBatch]:
        """All ids and rows, batch after batch, in no order that means something.

        A batch takes its own memory and, for each tensor that is read, a block of 8 MiB. Nothing is
        given out before the blocks that it comes from have been checked.

        Args:
            size: the most ids of a batch, at least 1.
            state: read optimizer state, too.
            scores: read scores, too.

        Returns:
            An iterator; each id comes once.

        Raises:
            TypeError, ValueError: a wrong argument.
            DamagedFileError: a file is damaged or missing; the iterator raises it.
            RuntimeError: another checkpoint has taken its place; the iterator raises it.

        Example:
            >>> import tempfile, torch, torch_dynemb as td
            >>> items = td.DynamicEmbedding(2, optimizer=td.SGD(lr=0.5))
            >>> items(torch.tensor([7, 7, 9])).sum().backward()
            >>> folder = tempfile.TemporaryDirectory()
            >>> handle = td.checkpoint.save(folder.name + "/last", items)
            >>> with td.checkpoint.open(folder.name + "/last") as saved:
            ...     for batch in saved.tables["embedding"].batches(1000):
            ...         print(batch.ids.sort().values, batch.rows.shape)
            tensor([7, 9]) torch.Size([2, 2])
            >>> folder.cleanup()
        """
        size = integer("batches: size", size, least=1)
        flag("batches: state", state)
        flag("batches: scores", scores)
        tensors = self.state_tensors if state else ()
        return self._batches(size, tensors, self.scores if scores else ())

    def _batches(
        self, size: int, state: Sequence[StateTensor], words: tuple[str, ...]
    ) -> Iterator[SavedBatch]:
        for first in self._saved.first_parts:
            with ExitStack() as stack:
                shards = [
                    _Shard(part, stack.enter_context(self._opened(part.rows)), self.dtype)
                    for part in self._shards_of(first)
                ]
                for begin in range(0, first.ids, size):
                    # no name here keeps a batch alive while the next one is read
                    yield self._batch(
                        shards, range(begin, min(begin + size, first.ids)), state, words
                    )
                    for shard in shards:
                        shard.rows.pass_by(begin + size)

    @plain_torch()
    def _batch(
        self,
        shards: Sequence[_Shard],
        places: range,
        state: Sequence[StateTensor],
        words: tuple[str, ...],
    ) -> SavedBatch:
        """The ids of some places of a part."""
        begin, count = places.start, len(places)
        ids = shards[0].read(ID, torch.int64, begin, count)
        scores = torch.empty(count, len(words), dtype=torch.int64)
        for k, word in enumerate(words):
            scores[:, k] = shards[0].read(score_entry(word), torch.int64, begin, count)
        values = {of.name: _state(shards, of, begin, count) for of in state}
        rows = _together([shard.weights(begin, count) for shard in shards])
        return SavedBatch(ids, rows, values, scores, words)

    def _shards_of(self, first: SavedPart) -> list[SavedPart]:
        """The column shards of the ids of a part, by column."""
        parts = [part for part in self._saved.parts if part.id_slots == first.id_slots]
        return sorted(parts, key=lambda part: part.first_column)

    def _opened(self, files: Sequence[SavedFile]) -> AbstractContextManager[CheckedRows]:
        return self._files.opened(CheckedRows(self._files.folder, files))

    def id_batches(self, size: int) -> Iterator[Tensor]:
        """All ids, batch after batch, in the order of :meth:`batches`; rows are not read.

        Args:
            size: the most ids of a batch, at least 1.

        Returns:
            An iterator of int64 [n].

        Raises:
            TypeError, ValueError: a wrong argument.
            DamagedFileError: a file is damaged or missing; the iterator raises it.
            RuntimeError: another checkpoint has taken its place; the iterator raises it.
        """
        size = integer("id_batches: size", size, least=1)
        return self._columns([part.rows for part in self._saved.first_parts], (ID,), size, _only)

    def removed_batches(self, size: int) -> Iterator[Tensor]:
        """The ids that an increment says are gone since its parent, batch after batch.

        Args:
            size: the most ids of a batch, at least 1.

        Returns:
            An iterator of int64 [n]; a whole checkpoint has none.

        Raises:
            TypeError, ValueError: a wrong argument.
            DamagedFileError: a file is damaged or missing; the iterator raises it.
            RuntimeError: another checkpoint has taken its place; the iterator raises it.
        """
        integer("removed_batches: size", size, least=1)
        return iter(())

    def counts(self, size: int) -> Iterator[CountedIds]:
        """The ids that wait for admission and how often they were seen, batch after batch.

        Args:
            size: the most ids of a batch, at least 1.

        Returns:
            An iterator of records with ids and counts, int64 [n] each.

        Raises:
            TypeError, ValueError: a wrong argument.
            DamagedFileError: a file is damaged or missing; the iterator raises it.
            RuntimeError: another checkpoint has taken its place; the iterator raises it.
        """
        size = integer("counts: size", size, least=1)
        files = [[part.counts] for part in self._saved.first_parts if part.counts is not None]
        return self._columns(files, (ID, COUNT), size, CountedIds)

    def _columns(
        self,
        parts: Sequence[Sequence[SavedFile]],
        names: tuple[str, ...],
        size: int,
        record: Callable[..., Rows],
    ) -> Iterator[Rows]:
        """Some int64 [n] tensors of files, batch after batch."""
        for files in parts:
            with self._opened(files) as rows:
                for begin in range(0, rows.count, size):
                    count = min(size, rows.count - begin)
                    values = [_int64(rows, name, begin, count) for name in names]
                    rows.pass_by(begin + size)
                    yield record(*values)

    @plain_torch()
    def sketch(self) -> Tensor | None:
        """The counting sketch of the ids that wait for admission.

        Of several parts the cells are added up: a count is an upper bound.

        Returns:
            int32 [rows, width]; None: the table has none.

        Raises:
            DamagedFileError: a file is damaged or missing.
        """
        found = self.sketches(self._saved.first_parts)
        return None if not found else combined_sketch(found, max(of.shape[1] for of in found))

    @plain_torch()
    def sketches(self, parts: Sequence[SavedPart]) -> list[Tensor]:
        """The sketches of some parts, each once: parts may share one.

        Args:
            parts: of the table, as the manifest has them.

        Returns:
            int32 [rows, width] each.

        Raises:
            DamagedFileError: a file is damaged or missing.
        """
        result = []
        by_path = {part.sketch.path: part for part in parts if part.sketch is not None}
        for part in by_path.values():
            assert part.sketch is not None
            cells = torch.empty(SKETCH_ROWS, part.sketch_width, dtype=torch.int32)
            with self._opened([part.sketch]) as rows:
                rows.read(SKETCH, 0, cells)
            result.append(cells)
        return result


class _Shard(NamedTuple):
    """Some columns of the rows of a part.

    Attributes:
        part: that has them.
        rows: its files.
        dtype: of the rows.
    """

    part: SavedPart
    rows: CheckedRows
    dtype: torch.dtype

    def read(
        self, name: str, dtype: torch.dtype, begin: int, count: int, columns: int | None = None
    ) -> Tensor:
        """[count], or [count, columns]."""
        shape = (count,) if columns is None else (count, columns)
        out = torch.empty(shape, dtype=dtype)
        self.rows.read(name, begin, out)
        return out

    def weights(self, begin: int, count: int) -> Tensor:
        """[count, columns of the shard]."""
        return self.read(WEIGHT, self.dtype, begin, count, self.part.columns)


def _state(shards: Sequence[_Shard], tensor: StateTensor, begin: int, count: int) -> Tensor:
    """A tensor of optimizer state of whole rows."""
    name = state_entry(tensor.name)
    if tensor.per_row:
        return combined_by_row(
            [(of.part.columns, of.read(name, tensor.dtype, begin, count)) for of in shards]
        )
    widths = [tensor.columns(of.part.columns) for of in shards]
    return _together(
        [
            of.read(name, tensor.dtype, begin, count, width)
            for of, width in zip(shards, widths, strict=True)
        ]
    )


def _together(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), 1)


@plain_torch()
def _int64(rows: CheckedRows, name: str, begin: int, count: int) -> Tensor:
    out = torch.empty(count, dtype=torch.int64)
    rows.read(name, begin, out)
    return out


def _only(values: Tensor) -> Tensor:
    return values


__all__ = ["CheckpointFiles", "CheckpointTable", "SavedBatch"]
