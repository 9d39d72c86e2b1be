"""A table of a checkpoint: its description, and its ids and rows in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torch_dynemb.argument_checks import flag, integer
from torch_dynemb.checkpoint.reading.checked_rows import CheckedRows
from torch_dynemb.files.locations import Location
from torch_dynemb.ops.columns import SKETCH_ROWS
from torch_dynemb.optim.base import StateTensor
from torch_dynemb.parts.saved_tables import SavedFile, SavedPart, SavedTable
from torch_dynemb.parts.sketches import combined_sketch
from torch_dynemb.process.torch_modes import plain_torch
from torch_dynemb.rows.column_shards import whole_rows
from torch_dynemb.rows.tensor_names import COUNT, ID, SKETCH, WEIGHT, score_entry, state_entry
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.row_batch import RowBatch

Rows = TypeVar("Rows")


class Closes(Protocol):
    """An open resource of a checkpoint."""

    def close(self) -> None:
        """Close it."""
        ...


Opened = TypeVar("Opened", bound=Closes)


class Opening(Protocol):
    """A function that registers a resource to be closed with the checkpoint."""

    def __call__(self, rows: Opened, /) -> AbstractContextManager[Opened]:
        """Register it for the duration of a ``with``.

        Args:
            rows: the open resource.
        """
        ...


class CheckpointFiles(NamedTuple):
    """Folder of a checkpoint, and registration of open files.

    Attributes:
        folder: folder of the checkpoint.
        opened: registers a resource to be closed with the checkpoint, for the duration of a
            ``with``.
    """

    folder: Location
    opened: Opening


class CheckpointTable:
    """A table of a checkpoint; :class:`Checkpoint` creates it.

    Args:
        name: name of the table.
        saved: its entry in the manifest.
        files: access to its files.

    Attributes:
        name: name of the table.
        embedding_dim: columns of its rows.
        dtype: dtype of its rows.
        packed: whether float32 columns are the bits of 8-bit rows with a scale.
        ids: number of ids.
        counted: number of ids that wait for admission.
        removed: number of ids removed since the parent, for an increment.
        seed: seed of initial values.
        padding_idx: id without a row; None if there is none.
        optimizer: its name, and for each state tensor whether it has one value per row, and its
            dtype; None if the table was not trained.
        hyper: hyper-parameters of the optimizer, as lists of numbers.
        scores: names of the scores that are kept for each id.
        policy: score, capacity, behaviour when full, admission and ttl.
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
        """Saved tensors of optimizer state."""
        return self._saved.state_tensors

    @property
    def counts_ids(self) -> bool:
        """Whether it counts each id that waits for admission."""
        return any(part.counts is not None for part in self._saved.first_parts)

    @property
    def row_bytes(self) -> int:
        """Bytes of an id with its row, state and scores."""
        state = sum(tensor.row_bytes(self.embedding_dim) for tensor in self.state_tensors)
        return 8 + 8 * len(self.scores) + self.dtype.itemsize * self.embedding_dim + state

    def batches(self, size: int, *, state: bool = True, scores: bool = True) -> Iterator[RowBatch]:
        """Iterate over all ids and rows in batches, in no particular order.

        A batch takes its own memory, and a block of 8 MiB for each tensor that is read. Values are
        returned only after their blocks have been checked.

        Args:
            size: largest number of ids in a batch, at least 1.
            state: also read optimizer state.
            scores: also read scores.

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

    def batches_by_shard(self, size: int, columns: Sequence[range]) -> Iterator[RowBatch]:
        """Iterate as :meth:`batches`, with state of column shards.

        Args:
            size: largest number of ids in a batch.
            columns: of each shard. State with one value per row is [n, shards].
        """
        return self._batches(size, self.state_tensors, self.scores, columns)

    def _batches(
        self,
        size: int,
        state: Sequence[StateTensor],
        words: tuple[str, ...],
        columns: Sequence[range] | None = None,
    ) -> Iterator[RowBatch]:
        for first in self._saved.first_parts:
            with ExitStack() as stack:
                shards = [
                    _Shard(part, stack.enter_context(self._opened(part.rows)), self.dtype)
                    for part in self._shards_of(first)
                ]
                for begin in range(0, first.ids, size):
                    # not assigned to a name, so that a batch is freed while the next one is read
                    yield self._batch(
                        shards, range(begin, min(begin + size, first.ids)), state, words, columns
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
        columns: Sequence[range] | None,
    ) -> RowBatch:
        """Read the ids in a range of a part."""
        ids = shards[0].read(ID, torch.int64, places)
        scores = {word: shards[0].read(score_entry(word), torch.int64, places) for word in words}
        per_row = {of.name for of in state if of.per_row}
        of_shards = [shard.batch(ids, places, state) for shard in shards]
        return whole_rows(of_shards, per_row, columns)._replace(scores=scores)

    def _shards_of(self, first: SavedPart) -> list[SavedPart]:
        """List the column shards with the ids of a part, by column."""
        parts = [part for part in self._saved.parts if part.id_slots == first.id_slots]
        return sorted(parts, key=lambda part: part.first_column)

    def _opened(self, files: Sequence[SavedFile]) -> AbstractContextManager[CheckedRows]:
        return self._files.opened(CheckedRows(self._files.folder, files))

    def id_batches(self, size: int) -> Iterator[Tensor]:
        """Iterate over all ids in batches, in the order of :meth:`batches`. Rows are not read.

        Args:
            size: largest number of ids in a batch, at least 1.

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
        """Iterate over the ids that an increment removes since its parent, in batches.

        Args:
            size: largest number of ids in a batch, at least 1.

        Returns:
            An iterator of int64 [n]; empty for a whole checkpoint.

        Raises:
            TypeError, ValueError: a wrong argument.
            DamagedFileError: a file is damaged or missing; the iterator raises it.
            RuntimeError: another checkpoint has taken its place; the iterator raises it.
        """
        integer("removed_batches: size", size, least=1)
        return iter(())

    def counts(self, size: int) -> Iterator[CountedIds]:
        """Iterate over the ids that wait for admission, with their counts, in batches.

        Args:
            size: largest number of ids in a batch, at least 1.

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
        """Iterate over int64 [n] tensors of files, in batches."""
        for files in parts:
            with self._opened(files) as rows:
                for begin in range(0, rows.count, size):
                    count = min(size, rows.count - begin)
                    values = [_int64(rows, name, begin, count) for name in names]
                    rows.pass_by(begin + size)
                    yield record(*values)

    @plain_torch()
    def sketch(self) -> Tensor | None:
        """Read the counting sketch of the ids that wait for admission.

        The cells of several parts are added, so each count is an upper bound.

        Returns:
            int32 [rows, width]; None if the table has none.

        Raises:
            DamagedFileError: a file is damaged or missing.
        """
        found = self.sketches(self._saved.first_parts)
        return None if not found else combined_sketch(found, max(of.shape[1] for of in found))

    @plain_torch()
    def sketches(self, parts: Sequence[SavedPart]) -> list[Tensor]:
        """Read the sketches of some parts, each once: parts may share one.

        Args:
            parts: parts of the table, as in the manifest.

        Returns:
            int32 [rows, width] each.

        Raises:
            DamagedFileError: a file is damaged or missing.
        """
        result = []
        by_path = {part.sketch.path: part for part in parts if part.sketch is not None}
        for part in by_path.values():
            assert part.sketch is not None
            cells = torch.empty(SKETCH_ROWS, part.sketch_width, dtype=torch.int32, device="cpu")
            with self._opened([part.sketch]) as rows:
                rows.read(SKETCH, 0, cells)
            result.append(cells)
        return result


class _Shard(NamedTuple):
    """Some columns of the rows of a part.

    Attributes:
        part: part with these columns.
        rows: its files.
        dtype: dtype of the rows.
    """

    part: SavedPart
    rows: CheckedRows
    dtype: torch.dtype

    def read(
        self, name: str, dtype: torch.dtype, places: range, columns: int | None = None
    ) -> Tensor:
        """Read [n] or [n, columns] values."""
        shape = (len(places),) if columns is None else (len(places), columns)
        out = torch.empty(shape, dtype=dtype, device="cpu")
        self.rows.read(name, places.start, out)
        return out

    def batch(self, ids: Tensor, places: range, state: Sequence[StateTensor]) -> RowBatch:
        """Read the shard's columns of some rows, and their state."""
        columns = self.part.columns
        values = {
            of.name: self.read(state_entry(of.name), of.dtype, places, of.columns(columns))
            for of in state
        }
        rows = self.read(WEIGHT, self.dtype, places, columns)
        return RowBatch(ids, rows, values, first_column=self.part.first_column)


@plain_torch()
def _int64(rows: CheckedRows, name: str, begin: int, count: int) -> Tensor:
    out = torch.empty(count, dtype=torch.int64, device="cpu")
    rows.read(name, begin, out)
    return out


def _only(values: Tensor) -> Tensor:
    return values


__all__ = ["CheckpointFiles", "CheckpointTable"]
