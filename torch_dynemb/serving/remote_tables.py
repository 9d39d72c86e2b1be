"""Read-only tables with rows in Redis, and models of them that answer with rows of one commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_dynemb.argument_checks import described
from torch_dynemb.delta_log.reader import LogPosition
from torch_dynemb.delta_log.redis.row_keys import RowPosition
from torch_dynemb.delta_log.redis.rows import RedisRows
from torch_dynemb.errors import ReplacedError
from torch_dynemb.nn.features import begins_of_features
from torch_dynemb.ops.columns import GENERATION_BITS, NO_HANDLE, PADDING_HANDLE, Meta
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.serving.missing import CountedTables, CountsMissing, note_missing
from torch_dynemb.serving.table_names import names_in_log, served_names
from torch_dynemb.table.group import TableGroup

# RemoteTables._read outside of graphs; made with the first tables, because it imports compilers
_read_eagerly: Callable[[RemoteTables, LookupBatch], Tensor] | None = None
_GENERATION = 1  # of all rows of a lookup


class _OtherCommitError(Exception):
    """A lookup has read rows of another commit than one before it in the same forward."""


class _Answers(threading.local):
    """Positions of the rows of a thread.

    Attributes:
        open: that of each running forward, the innermost one last; None: nothing is read yet.
    """

    def __init__(self) -> None:
        self.open: list[RowPosition | None] = []


_answers = _Answers()


class RemoteTables(CountedTables):
    """A group's tables, with rows in Redis under the names of a checkpoint.

    Args:
        group: tables of the names, dims, initial values and padding ids; its rows are not copied.
        storage: the rows.
        kept_because: reason if rows cannot be stored as plain numbers.

    Raises:
        ValueError: such rows are not in Redis.
    """

    def __init__(self, group: TableGroup, storage: RedisRows, kept_because: str | None) -> None:
        super().__init__()
        global _read_eagerly
        if _read_eagerly is None:
            _read_eagerly = torch.compiler.disable(RemoteTables._read)
        if kept_because is not None:
            raise ValueError(f"freeze: storage is {storage!r}, but {kept_because}")
        self.names = group.names
        self.storage = storage
        self.full_names: list[str] = []  # in the checkpoint
        self._dtypes = [slab.dtype for slab in group.config.slabs]
        meta = group.index.meta[: len(group.config.tables)].clone()
        meta[:, Meta.TIERED] = 0
        self.register_buffer("meta", meta, persistent=False)
        self.register_buffer("init_data", group.rows.init_data.clone(), persistent=False)
        self._no_offsets = meta.new_empty(0)

    def open(self, names: Sequence[str | None]) -> None:
        """Compare the tables with those in Redis.

        Args:
            names: of the tables there; None: it lacks the table.

        Raises:
            ValueError: Redis has no such table, or one with other columns.
            UnsupportedFormatError, OSError, RuntimeError: see :meth:`RedisRows.read`.
        """
        columns, known = self.storage.columns, []
        dims = self.get_buffer("meta")[:, Meta.DIM].tolist()
        for own, name, dim in zip(self.names, names, dims, strict=True):
            if name is None or columns[name] != dim:
                raise ValueError(
                    f"freeze: table {name or own!r} has dim {dim}, but {self.storage!r} has "
                    f"{columns}: give the rows of a checkpoint of this model"
                )
            known.append(name)
        self.full_names = known

    def sizes(self) -> dict[str, int]:
        """Raise RuntimeError: Redis has the ids."""
        raise RuntimeError(
            f"RemoteTables: the ids of {self.names} are in {self.storage!r}, which does not count "
            "them by table"
        )

    def extra_repr(self) -> str:
        return f"{self.names} in {self.storage!r}"

    def _served(self, batch: LookupBatch) -> Tensor:
        assert _read_eagerly is not None
        return _read_eagerly(self, batch)

    def _read(self, batch: LookupBatch) -> Tensor:
        _refuse_export()
        tables = self._tables_of(batch)
        is_asked = [tables == number for number in range(len(self.names))]
        asked = [number for number, of in enumerate(is_asked) if bool(of.any())]
        found, positions = self.storage.reader.read_all(
            [(self.full_names[number], batch.ids[is_asked[number]]) for number in asked]
        )
        _note(positions)
        meta: Any = self.get_buffer("meta")
        handles = torch.full_like(batch.ids, NO_HANDLE)
        weights: list[list[Tensor]] = [[] for _ in self._dtypes]
        counts = [0] * len(self._dtypes)
        for number, of in zip(asked, found, strict=True):
            slab = int(meta[number, Meta.SLAB])
            places = counts[slab] + of.places
            handles[is_asked[number]] = torch.where(
                of.found[of.places], (places << GENERATION_BITS) | _GENERATION, NO_HANDLE
            ).to(handles.device)
            weights[slab].append(of.rows)
            counts[slab] += len(of.rows)
        is_padding = meta[tables, Meta.HAS_PADDING].bool()
        is_padding &= meta[tables, Meta.PADDING_ID] == batch.ids
        handles.masked_fill_(is_padding, PADDING_HANDLE)
        is_missing = handles == NO_HANDLE
        note_missing(self.place, torch.stack([(of & is_missing).sum() for of in is_asked]))
        slabs = [self._slab(meta, slab, rows) for slab, rows in enumerate(weights)]
        output: Tensor = torch.ops.dynemb.embedding_inference(
            slabs,
            [rows.new_full(rows.shape[:1], _GENERATION, dtype=torch.int32) for rows in slabs],
            meta,
            self.get_buffer("init_data"),
            batch.ids,
            handles,
            batch.offsets,
            batch.per_sample_weights,
            batch.feature_tables,
            batch.feature_dims,
            int(batch.pooling),
            [],
        )
        return output

    def _tables_of(self, batch: LookupBatch) -> Tensor:
        """Return int64 [N], the table of each id."""
        ids, features = batch.ids, len(batch.feature_tables)
        if batch.offsets.shape[0] == 0:
            return torch.full_like(ids, batch.feature_tables[0])
        lengths = begins_of_features(batch.offsets, features).diff()
        tables = torch.tensor(batch.feature_tables, device=ids.device)
        return tables.repeat_interleave(lengths, output_size=len(ids))

    def _slab(self, meta: Tensor, slab: int, rows: list[Tensor]) -> Tensor:
        """Return the rows of a slab, at least one, as kernels need."""
        dim = int(meta[meta[:, Meta.SLAB] == slab, Meta.DIM][0])
        rows = [of for of in rows if len(of) > 0] or [torch.zeros(1, dim, device="cpu")]
        return torch.cat(rows).to(meta.device, self._dtypes[slab])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RemoteTables:
        """Move the constants as ``fn`` moves tensors; they keep their dtypes."""
        device = fn(torch.zeros(1, device="cpu")).device
        for name in ("meta", "init_data"):
            self.register_buffer(name, self.get_buffer(name).to(device), persistent=False)
        self._no_offsets = self.get_buffer("meta").new_empty(0)
        return self


class RemoteModel(nn.Module):
    """A frozen model with rows in Redis; ``td.freeze(model, storage=RedisRows(...))`` makes it.

    The rows of an answer are of one commit: a forward that has read rows of two is run again, until
    the ``timeout`` of the rows has passed. The dense state is that of the model that was frozen,
    while the rows follow training: :attr:`position` names the commit of an answer, and
    :meth:`require` refuses rows of another one. Each module with tables reads once, one after the
    other, so tables of one collection answer soonest.

    Args:
        model: with :class:`RemoteTables`.
        storage: their rows.

    Attributes:
        model: the model itself, or a :class:`CountsMissing` of it.
        storage: see the argument.

    Raises:
        ValueError: it has no dynamic tables, or Redis has other tables.
    """

    def __init__(self, model: nn.Module, storage: RedisRows) -> None:
        super().__init__()
        self.model, self.storage = model, storage
        self._required: RowPosition | LogPosition | None = None
        self._last = _Last()
        inner = model.model if isinstance(model, CountsMissing) else model
        parts = [(path, of) for path, of in inner.named_modules() if isinstance(of, RemoteTables)]
        served = [name for path, part in parts for name in served_names(path, part)]
        names = iter(names_in_log("freeze", served, storage.columns))
        for _, part in parts:
            part.open([next(names) for _ in part.names])
        if not parts:
            raise ValueError(
                f"freeze: storage is {storage!r}, but the model, a {type(inner).__name__}, has no "
                "dynamic tables: leave storage out"
            )
        self.training = False

    @property
    def position(self) -> RowPosition | None:
        """Commit of the rows of this thread's last forward; None: it has read none."""
        return self._last.position

    @property
    def sequence(self) -> int | None:
        """Number of that commit; None if the rows are those of the base."""
        return None if self.position is None else self.position.sequence

    def require(self, position: RowPosition | LogPosition | None) -> None:
        """Answer with the rows of one commit only, such as that of the dense state.

        Args:
            position: :attr:`position` of an answer, or ``log.position()`` of the trainer when its
                model was frozen. None: any commit.

        Raises:
            TypeError: ``position`` is neither.
        """
        if position is not None and not isinstance(position, RowPosition | LogPosition):
            raise TypeError(
                f"RemoteModel.require: position is {described(position)}, expected that of an "
                "answer, DeltaLog.position(), or None"
            )
        self._required = position

    def train(self, mode: bool = True) -> RemoteModel:
        """Do nothing: a frozen module only reads."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Args:
            *args: of the model's forward.
            **kwargs: likewise.

        Raises:
            ReplacedError: rows were of several commits until the end, or of another one than
                :meth:`require` asked for.
            Exception: as :meth:`RedisRows.read` raises for nodes that fail, and as the model.
        """
        _refuse_export()
        until = time.monotonic() + self.storage.timeout
        while True:
            _answers.open.append(None)
            try:
                output = self.model(*args, **kwargs)
            except _OtherCommitError:
                if time.monotonic() >= until:
                    raise ReplacedError(
                        f"RemoteModel: rows of {self.storage!r} were replaced in each forward for "
                        f"{self.storage.timeout} seconds: call again, publish less often, or put "
                        "the tables into one collection, which reads them at once"
                    ) from None
                continue
            finally:
                position = _answers.open.pop()
            self._check(position)
            self._last.position = position
            return output

    def _check(self, position: RowPosition | None) -> None:
        wanted = self._required
        if wanted is None or position is None:
            return
        is_same = (position.base, position.sequence) == (wanted.base, wanted.sequence)
        if isinstance(wanted, RowPosition):
            is_same = position == wanted
        elif is_same and position.chains:
            is_same = position.chains[wanted.rank] == wanted.chain
        if not is_same:
            raise ReplacedError(
                f"RemoteModel: the rows are of {_named(position)}, but those of {_named(wanted)} "
                "are required: freeze the model of that commit, or call require(None), and read "
                "position after each call"
            )


class _Last(threading.local):
    """Position of a thread's last answer; a copy has none."""

    position: RowPosition | None = None

    def __deepcopy__(self, memo: object) -> _Last:
        return _Last()


def _note(positions: tuple[RowPosition, ...]) -> None:
    """Report the commit of a lookup to the running forward."""
    if not _answers.open:
        raise RuntimeError(
            "RemoteTables: a lookup runs outside of a forward of its RemoteModel, or in another "
            "thread than it, so its rows may be of another commit: call the RemoteModel, and look "
            "up in the thread of its forward"
        )
    if not positions:
        return
    if _answers.open[-1] not in (None, positions[0]):
        raise _OtherCommitError
    _answers.open[-1] = positions[0]


def _named(position: RowPosition | LogPosition) -> str:
    commit = "" if position.sequence is None else f"commit {position.sequence} of "
    return f"{commit}base {position.base}"


def _refuse_export() -> None:
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise RuntimeError(
            "RemoteModel: a program of torch.export or torch.jit.trace cannot read rows in Redis: "
            "run the model eager, or freeze and export it without storage="
        )


__all__ = ["RemoteModel", "RemoteTables"]
