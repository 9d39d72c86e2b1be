"""A group of tables as an object: the tensors of its index and rows, and what is done to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dynemb import life_cycle, ops, table_allocation, table_state
from torch_dynemb.initializers import Initializer, Normal
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    BUCKET_WORDS,
    GENERATION_BITS,
    MAX_ROWS,
    Hyper,
    Meta,
    Pooling,
    RowClock,
    Slab,
    Table,
)
from torch_dynemb.ops.lookup import Rows
from torch_dynemb.ops.update import NO_OPTIMIZER, OPTIMIZER_NAMES
from torch_dynemb.optim.config import OptimizerConfig
from torch_dynemb.table_memory import memory_of

EvalDefault = Literal["initial", "zeros"] | Tensor
Score = Literal["none", "step"]


@dataclass(frozen=True, eq=False)
class TableConfig:
    """One table of a group.

    Args:
        name: names the table in checkpoints and seeds its initial values; unique in its group.
        embedding_dim: columns of a row.
        feature_names: features that look it up (default: one, named as the table).
        initializer: of new rows.
        padding_idx: an id that is looked up as zeros, never inserted and never trained.
        eval_default: what a read gives for an id that is not in the table: ``"initial"`` (the value
            it would start with), ``"zeros"``, or a float tensor [embedding_dim].
    """

    name: str
    embedding_dim: int
    feature_names: Sequence[str] = ()
    initializer: Initializer = field(default_factory=Normal)
    padding_idx: int | None = None
    eval_default: EvalDefault = "initial"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("TableConfig: name is empty, expected a name for the table")
        if isinstance(self.embedding_dim, bool) or not isinstance(self.embedding_dim, int):
            raise TypeError(
                f"TableConfig {self.name!r}: embedding_dim is {self.embedding_dim!r}, expected int"
            )
        if self.embedding_dim <= 0:
            raise ValueError(
                f"TableConfig {self.name!r}: embedding_dim is {self.embedding_dim}, expected at "
                "least 1"
            )
        if not isinstance(self.initializer, Initializer):
            raise TypeError(
                f"TableConfig {self.name!r}: initializer is {self.initializer!r}, expected one of "
                "torch_dynemb's initializers, such as Uniform(-0.01, 0.01)"
            )
        if isinstance(self.eval_default, Tensor):
            if tuple(self.eval_default.shape) != (self.embedding_dim,):
                raise ValueError(
                    f"TableConfig {self.name!r}: eval_default has shape "
                    f"{tuple(self.eval_default.shape)}, expected ({self.embedding_dim},)"
                )
        elif self.eval_default not in ("initial", "zeros"):
            raise ValueError(
                f"TableConfig {self.name!r}: eval_default is {self.eval_default!r}, expected "
                "'initial', 'zeros' or a tensor"
            )
        if self.padding_idx is not None and not -(1 << 63) <= self.padding_idx < (1 << 63):
            raise ValueError(
                f"TableConfig {self.name!r}: padding_idx is {self.padding_idx}, expected an int64"
            )
        object.__setattr__(self, "feature_names", tuple(self.feature_names) or (self.name,))

    def description(self) -> dict[str, Any]:
        """What identifies the table in a checkpoint."""
        return {"name": self.name, "embedding_dim": self.embedding_dim}


class ExportedRows(NamedTuple):
    """A batch of a table's content: ids int64 [n], rows float32 [n, dim], scores int64 [n]."""

    ids: Tensor
    rows: Tensor
    scores: Tensor


def _base_seed() -> int:
    """torch.initial_seed(), of rank 0 where there are ranks: an id starts equal on all of them."""
    seed = [torch.initial_seed()]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(seed, src=0)
    return seed[0]


class TableGroup:
    """Tables that are looked up together: one index, one slab of rows per distinct dim.

    Memory is reserved as address space for as many rows as the machine could hold and taken as ids
    arrive: rows never move, and no tensor changes shape. One thread may insert or train at a time;
    any number may read while none writes.

    Args:
        tables: at least one; names must differ.
        optimizer: of the rows; None for a group that is only read.
        score: ``"step"`` keeps, per id, the optimizer step at which it was last looked up in
            training.
        max_rows: rows to reserve per slab; default: what would fill the device's memory.
        seed: default ``torch.initial_seed()``; with a process group, that of rank 0.
        device: of all tensors; default: torch's default device.
    """

    meta: Tensor
    init_data: Tensor
    buckets: Tensor
    scores: Tensor
    tables: Tensor
    slabs: Tensor
    free_rows: Tensor
    clock: Tensor
    weights: list[Tensor]
    generations: list[Tensor]
    state: list[Tensor]
    row_clock: Tensor
    hyper: Tensor

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        optimizer: OptimizerConfig | None,
        score: Score = "none",
        max_rows: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not tables:
            raise ValueError("TableGroup: tables is empty, expected at least one table")
        names = [table.name for table in tables]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"TableGroup: {names.count(name)} tables are named {name!r}")
        if score not in ("none", "step"):
            raise ValueError(f"TableGroup: score is {score!r}, expected 'none' or 'step'")
        if optimizer is not None and not isinstance(optimizer, OptimizerConfig):
            raise TypeError(
                f"TableGroup: optimizer is {optimizer!r}, expected a config such as "
                "torch_dynemb.Adam(lr=1e-3); the rows have no torch parameters"
            )
        if max_rows is not None and not 0 < max_rows <= MAX_ROWS:
            raise ValueError(
                f"TableGroup: max_rows is {max_rows}, expected 1 to {MAX_ROWS}, or None"
            )
        self.tables_config = tuple(tables)
        self.optimizer_config = optimizer
        self.score: Score = score
        self.max_rows = max_rows
        self.seed = _base_seed() if seed is None else seed
        self.dims = sorted({table.embedding_dim for table in tables})
        self.optimizer_code = (
            NO_OPTIMIZER if optimizer is None else OPTIMIZER_NAMES.index(optimizer.op_name)
        )
        self._memory = memory_of("TableGroup", device)
        self._place()

    def _place(self) -> None:
        """Makes the tensors, empty."""
        table_allocation.allocate(self, self._memory)
        for tensor in self._tensors():
            # else dynamic=True takes a batch size that equals a dim of a table for that dim
            torch._dynamo.mark_static(tensor)
            if tensor.is_cuda:
                # else CUDA graphs of compiled code would copy it before every replay
                torch._dynamo.mark_static_address(tensor)

    # -- state ---------------------------------------------------------------------------------

    def _tensors(self) -> list[Tensor]:
        """All tensors of the group; none of them ever changes its shape or address."""
        index = [self.buckets, self.scores, self.tables, self.slabs, self.free_rows, self.clock]
        rows = [*self.weights, *self.generations, *self.state, self.row_clock]
        return [*index, *rows, self.hyper, self.meta, self.init_data]

    def row_bytes(self, dim: int) -> int:
        """Weights, generation and optimizer state of one row."""
        state = () if self.optimizer_config is None else self.optimizer_config.state
        return 4 * dim + 4 + sum(4 if tensor.per_row else 4 * dim for tensor in state)

    @property
    def device(self) -> torch.device:
        """Where all tensors of the group lie."""
        return self._memory.device

    def to(self, device: torch.device) -> None:
        """Moves everything to another device: new tensors, the old ones are given back.

        Raises:
            RuntimeError: tables cannot lie there, or too little memory; nothing has been moved.
        """
        memory = memory_of("TableGroup.to", device)
        if memory.device == self.device:
            return
        moved = TableGroup.__new__(TableGroup)
        state = self.__getstate__()
        moved.__setstate__({**state, "arguments": {**state["arguments"], "device": memory.device}})
        self.__dict__.update(moved.__dict__)

    def bind_memory(self, buckets: Sequence[int] = (), rows: Sequence[int] = ()) -> None:
        """After counts were written from outside; see :func:`torch_dynemb.ops.bind_group`."""
        self._memory.bind(self, buckets, rows)

    def end_step(self) -> None:
        """Ends a training step; see :func:`torch_dynemb.ops.end_step`."""
        self._memory.end_step(self)

    @property
    def rows(self) -> Rows:
        """The row tensors in the order in which ops take them."""
        return Rows(
            self.weights,
            self.generations,
            self.state,
            self.row_clock,
            self.hyper,
            self.meta,
            self.init_data,
        )

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return [table.name for table in self.tables_config]

    # -- lookup --------------------------------------------------------------------------------

    def find(self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int]) -> ops.FoundIds:
        """Handles of ids; see :func:`torch_dynemb.ops.find`."""
        return ops.find(self.buckets, self.tables, self.meta, ids, offsets, feature_tables)

    def find_or_insert(self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int]) -> Tensor:
        """Handles of ids; new ids get a row. See :func:`torch_dynemb.ops.find_or_insert_`."""
        return ops.find_or_insert_(
            self.buckets,
            self.scores,
            self.tables,
            self.slabs,
            self.free_rows,
            self.meta,
            self.clock,
            ids,
            offsets,
            feature_tables,
        )

    def _config(self, table: int) -> TableConfig:
        if not 0 <= table < len(self.tables_config):
            raise IndexError(f"table is {table}, expected 0 to {len(self.tables_config) - 1}")
        return self.tables_config[table]

    def _one_table(self, table: int, ids: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        self._config(table)
        flat = ids.reshape(-1).contiguous()
        return flat, torch.tensor([0, flat.numel()], device=flat.device), [table]

    def insert(self, table: int, ids: Tensor) -> Tensor:
        """Gives rows to ids, int64 of any shape, of one table; returns handles int64 [n]."""
        return self.find_or_insert(*self._one_table(table, ids))

    def contains(self, table: int, ids: Tensor) -> Tensor:
        """Which ids are in a table: bool of the shape of ``ids``."""
        return (self.find(*self._one_table(table, ids)).handles >= 0).reshape(ids.shape)

    def erase(self, table: int, ids: Tensor) -> int:
        """Removes ids from a table; returns how many were there. Later ids reuse their rows."""
        erased = ops.erase_(
            self.buckets,
            self.scores,
            self.tables,
            self.slabs,
            self.free_rows,
            self.meta,
            *self._one_table(table, ids),
        )
        return int(erased[table])

    def reserve(self, table: int, ids: int) -> None:
        """Grows a table's index once, so that ``ids`` ids fit without another growth."""
        self._config(table)
        if ids < 0:
            raise ValueError(f"reserve: ids is {ids}, expected at least 0")
        ops.grow_(self.buckets, self.scores, self.tables, self.meta, table, ids)

    def read(self, table: int, ids: Tensor) -> Tensor:
        """Rows of ids, float32 [n, dim]; an id that is not in the table gives its default."""
        flat, offsets, features = self._one_table(table, ids)
        return ops.embedding_inference(
            self.rows,
            flat,
            self.find(flat, offsets, features).handles,
            offsets,
            feature_tables=features,
            dim=self.tables_config[table].embedding_dim,
        )

    def write(self, table: int, ids: Tensor, rows: Tensor) -> None:
        """Sets rows of ids, inserting those that are new; optimizer state of a new row is fresh.

        Args:
            ids: int64 [n], distinct.
            rows: float32 [n, dim].

        Raises:
            ValueError: shapes do not match, an id is given twice, or one is the padding id.
            RuntimeError: the table is full, or memory is short; nothing has been written.
        """
        config = self._config(table)
        if tuple(rows.shape) != (ids.numel(), config.embedding_dim):
            raise ValueError(
                f"write: rows has shape {tuple(rows.shape)}, expected "
                f"({ids.numel()}, {config.embedding_dim})"
            )
        if torch.unique(ids).numel() != ids.numel():
            raise ValueError("write: ids has repeated ids, expected every id once")
        if config.padding_idx is not None and bool((ids == config.padding_idx).any()):
            raise ValueError(
                f"write: ids has the padding id {config.padding_idx}, which has no row"
            )
        handles = self.insert(table, ids)
        if bool((handles < 0).any()):  # a GPU has refused the ids, and says why here
            self.end_step()
            raise RuntimeError("write: the table has no room for all ids; nothing has been written")
        slab = int(self.meta[table, Meta.SLAB])
        written = handle_rows(handles)
        generations = (handles & ((1 << GENERATION_BITS) - 1)).to(torch.int32)
        fresh = written[self.generations[slab][written] != generations]
        for state in self.state[slab :: len(self.dims)]:
            state[fresh] = self.hyper[table, Hyper.INITIAL_STATE].to(torch.float32)
        self.weights[slab][written] = rows.detach().to(torch.float32)
        self.generations[slab][written] = generations

    def materialize(self) -> int:
        """Writes the rows that no backward has written yet; returns how many."""
        return int(
            ops.materialize_(
                self.weights,
                self.generations,
                self.state,
                self.buckets,
                self.tables,
                self.hyper,
                self.meta,
                self.init_data,
            )
        )

    def export(self, table: int, *, batch_size: int = 1 << 20) -> Iterator[ExportedRows]:
        """All ids of a table with their rows and scores, at most ``batch_size`` at a time.

        The table must not change while it is iterated.
        """
        if batch_size < BUCKET_WIDTH:
            raise ValueError(
                f"export: batch_size is {batch_size}, expected at least {BUCKET_WIDTH}"
            )
        dim = self._config(table).embedding_dim
        for batch in life_cycle.exported(self, table, batch_size):
            rows = ops.embedding_inference(
                self.rows,
                batch.ids,
                batch.handles,
                torch.tensor([0, batch.ids.numel()], device=self.device),
                feature_tables=[table],
                dim=dim,
            )
            yield ExportedRows(batch.ids, rows, batch.scores)

    # -- life cycle ----------------------------------------------------------------------------

    def get_score(self, table: int, ids: Tensor) -> ops.ScoredIds:
        """Scores of ids of one table; see :func:`torch_dynemb.ops.get_scores`."""
        flat, offsets, features = self._one_table(table, ids)
        return ops.get_scores(
            self.buckets, self.scores, self.tables, self.meta, flat, offsets, features
        )

    def set_score(self, table: int, ids: Tensor, scores: Tensor) -> int:
        """Sets the scores of the ids that are in a table; returns how many are.

        Args:
            ids: int64 [n], distinct.
            scores: int64 [n].

        Raises:
            ValueError, TypeError: shape or dtype of scores, or an id is given twice.
            RuntimeError: the group keeps no scores.
        """
        if torch.unique(ids).numel() != ids.numel():
            raise ValueError("set_score: ids has repeated ids, expected every id once")
        flat, offsets, features = self._one_table(table, ids)
        found = ops.set_scores_(
            self.buckets,
            self.scores,
            self.tables,
            self.meta,
            flat,
            offsets,
            features,
            scores.reshape(-1).contiguous(),
        )
        return int(found.sum())

    def remove(
        self,
        table: int,
        *,
        not_seen_for: int | None = None,
        score_below: int | None = None,
        norm_below: float | None = None,
        predicate: life_cycle.Predicate | None = None,
        batch_size: int = 1 << 20,
    ) -> int:
        """Removes the ids of a table for which one condition holds; later ids get their rows.

        Between training steps only: handles of a forward whose backward is still to come become
        stale, and their gradients are dropped and counted.

        Args:
            not_seen_for: that no training lookup of the last so many steps has met.
            score_below: whose score is less.
            norm_below: whose row has a smaller L2 norm (an untrained row: its initial value).
            predicate: from ids int64 [n] and scores int64 [n] of a batch to bool [n].
            batch_size: ids looked at at a time.

        Returns:
            How many ids were removed.

        Raises:
            ValueError, TypeError: no condition or several, or one that does not fit the group;
                nothing has been removed.
        """
        self._config(table)
        condition = life_cycle.condition_of(
            self,
            table,
            not_seen_for=not_seen_for,
            score_below=score_below,
            norm_below=norm_below,
            predicate=predicate,
        )
        return life_cycle.remove(self, table, condition, batch_size)

    def clear(self, table: int) -> int:
        """Removes all ids of a table; returns how many. Its index keeps its size."""
        return self.remove(table, predicate=lambda ids, _: torch.ones_like(ids, dtype=torch.bool))

    def stats(self) -> dict[str, life_cycle.TableStats]:
        """What each table holds and what has happened to it, by name."""
        return life_cycle.stats(self)

    def log_to(self, writer: life_cycle.ScalarWriter, step: int | None = None) -> None:
        """Writes :meth:`stats` to a ``torch.utils.tensorboard.SummaryWriter``, as ``table/name``.

        Args:
            writer: anything with its ``add_scalar``.
            step: default: the number of ``optimizer.step()`` so far.
        """
        at = int(self.clock) if step is None else step
        for table, values in self.stats().items():
            for name, value in values.as_dict().items():
                writer.add_scalar(f"{table}/{name}", value, at)

    # -- sizes ---------------------------------------------------------------------------------

    def size(self, table: int) -> int:
        """Number of ids in a table."""
        self._config(table)
        return int(self.tables[table, Table.SIZE])

    def sizes(self) -> dict[str, int]:
        """Number of ids by table name."""
        return dict(zip(self.names, self.tables[:, Table.SIZE].tolist(), strict=True))

    def used_rows(self, slab: int) -> int:
        """Rows of a slab that have ever had an owner."""
        return int(self.slabs[slab, Slab.NEXT_ROW])

    def memory(self) -> dict[str, int]:
        """Bytes in use: ``rows`` (with generations), ``state``, ``index``, ``total``."""
        rows = state = 0
        for s, dim in enumerate(self.dims):
            rows += self.used_rows(s) * (4 * dim + 4)
            state += self.used_rows(s) * (self.row_bytes(dim) - 4 * dim - 4)
        buckets = int(self.tables[:, Table.BUCKET_COUNT].sum())
        words = BUCKET_WORDS + (BUCKET_WIDTH if self.score != "none" else 0)
        index = 8 * (buckets * words + int(self.slabs[:, Slab.FREE_COUNT].sum()))
        return {"rows": rows, "state": state, "index": index, "total": rows + state + index}

    def stale_gradients(self) -> int:
        """Gradients dropped because their row had been given to another id."""
        return int(self.row_clock[len(self.tables_config) + RowClock.STALE])

    # -- serialisation -------------------------------------------------------------------------

    def active_buckets(self, table: int) -> slice:
        """The buckets of a table in ``buckets`` and ``scores``."""
        row, meta = self.tables[table], self.meta[table]
        begin = int(meta[Meta.REGION_BEGIN])
        return slice(begin, begin + int(row[Table.BUCKET_COUNT]))

    def state_names(self) -> set[str]:
        """Names of the entries of :meth:`state_tensors`."""
        return {"format", *(name for name, _ in table_state.used_tensors(self))}

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies of the used part of everything, after writing the rows that are not written yet.

        Loading it continues bit for bit. ``format`` is a JSON text as uint8.
        """
        self.materialize()
        return table_state.save(self)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces everything by a saved state, in place: compiled code knows the addresses.

        Raises:
            ValueError: ``tensors`` is not the state of a group like this one, or is damaged;
                nothing has been changed.
        """
        table_state.load(self, tensors)

    def constructor_arguments(self) -> dict[str, Any]:
        """What makes an equal, empty group."""
        return {
            "tables": self.tables_config,
            "optimizer": self.optimizer_config,
            "score": self.score,
            "max_rows": self.max_rows,
            "seed": self.seed,
            "device": self.device,
        }

    def __getstate__(self) -> dict[str, Any]:
        return {
            "arguments": self.constructor_arguments(),
            "state": self.state_tensors(),
            "hyper": self.hyper.clone(),
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(**saved["arguments"])  # type: ignore[misc]
        self.load_state_tensors(saved["state"])
        self.hyper.copy_(saved["hyper"])

    def __deepcopy__(self, memo: dict[int, Any]) -> TableGroup:
        copy = TableGroup.__new__(TableGroup)
        memo[id(self)] = copy
        copy.__setstate__(self.__getstate__())
        return copy


def handle_rows(handles: Tensor) -> Tensor:
    """Row numbers of handles, int64; handles must not be negative."""
    return handles >> GENERATION_BITS


def pooling_of(mode: str) -> Pooling:
    """The pooling of a mode name.

    Raises:
        ValueError: another name than ``"sum"`` or ``"mean"``.
    """
    if mode not in ("sum", "mean"):
        raise ValueError(
            f"mode is {mode!r}, expected 'sum' or 'mean' (nn.EmbeddingBag's 'max' is not supported)"
        )
    return Pooling.SUM if mode == "sum" else Pooling.MEAN


__all__ = ["ExportedRows", "TableConfig", "TableGroup", "handle_rows", "pooling_of"]
