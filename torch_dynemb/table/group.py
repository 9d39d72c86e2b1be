"""A group of tables as an object: the tensors of its index and rows, and what is done to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import flag, flat_int64, integer
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    BUCKET_WORDS,
    MAX_ROWS,
    Meta,
    OnFull,
    PolicyColumn,
    Pooling,
    RowClock,
    Slab,
    Table,
)
from torch_dynemb.ops.lookup import Rows
from torch_dynemb.ops.update import APPLIES_DELAYED, NO_OPTIMIZER, OPTIMIZER_NAMES
from torch_dynemb.optim.config import OptimizerConfig
from torch_dynemb.policy.admission import parse_bytes
from torch_dynemb.policy.layout import layout_of
from torch_dynemb.process.forked import check_own, watch
from torch_dynemb.process.sending import sent_as_bytes
from torch_dynemb.storage.memory import memory_of
from torch_dynemb.storage.static_tensors import mark_static
from torch_dynemb.table import (
    allocation as table_allocation,
)
from torch_dynemb.table import (
    extension as table_extension,
)
from torch_dynemb.table import (
    state as table_state,
)
from torch_dynemb.table.config import EvalDefault, SlabConfig, TableConfig, check_tables
from torch_dynemb.table.life_cycle import LifeCycle
from torch_dynemb.table.rows import ExportedRows, RowAccess, handle_rows


def _base_seed() -> int:
    """torch.initial_seed(), of rank 0 where there are ranks: an id starts equal on all of them."""
    seed = [torch.initial_seed()]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(seed, src=0)
    return seed[0]


def _code_of(optimizer: OptimizerConfig | None) -> int:
    """What lookups are given for an optimizer; see :func:`torch_dynemb.ops.embedding_bag`."""
    if optimizer is None:
        return NO_OPTIMIZER
    code = OPTIMIZER_NAMES.index(optimizer.op_name)
    return code + APPLIES_DELAYED if optimizer.delayed_gradients == "apply" else code


@sent_as_bytes
class TableGroup(LifeCycle, RowAccess):
    """Tables that are looked up together: one index, one slab of rows per distinct dim.

    Memory is reserved as address space for as many rows as the machine could hold and taken as ids
    arrive: rows never move, and no tensor changes shape. One thread may insert or train at a time
    (on the CPU, another that tries meanwhile raises RuntimeError, and has changed nothing); any
    number may read while none writes. A forked process may only read.

    Args:
        tables: at least one; names must differ.
        optimizer: of the rows; None for a group that is only read.
        max_rows: rows to reserve per slab; default: what the tables' capacities add up to, or what
            would fill the device's memory, but less where hundreds of groups share the addresses
            of the process.
        memory_budget: bytes that the tables may take together, index and optimizer state included,
            a number or a text such as ``"4GB"``; whoever needs room first gets it, but for a
            sixteenth of an equal share that is kept for each; where several need more than is left,
            they get equal parts. Then ids are evicted, or what their policy says. Exact counts of
            admission come on top, sketches do not.
        seed: default ``torch.initial_seed()``; with a process group, that of rank 0.
        device: of all tensors; default: torch's default device.
        split: backward only gathers gradients, and the optimizer's ``step()`` applies them.
    """

    owner: str | None = None  # the module that the group is part of

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        optimizer: OptimizerConfig | None,
        max_rows: int | None = None,
        memory_budget: int | str | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        split: bool = False,
    ) -> None:
        tables = check_tables("TableGroup", tables)
        names = [table.name for table in tables]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"TableGroup: {names.count(name)} tables are named {name!r}")
        if optimizer is not None and not isinstance(optimizer, OptimizerConfig):
            raise TypeError(
                f"TableGroup: optimizer is {optimizer!r}, expected a config such as "
                "torch_dynemb.Adam(lr=1e-3); the rows have no torch parameters"
            )
        if max_rows is not None:
            max_rows = integer("TableGroup: max_rows", max_rows, what="int or None")
            if not 0 < max_rows <= MAX_ROWS:
                raise ValueError(
                    f"TableGroup: max_rows is {max_rows}, expected 1 to {MAX_ROWS}, or None"
                )
        if seed is not None:
            seed = integer("TableGroup: seed", seed, most=(1 << 64) - 1, what="int or None")
        flag("TableGroup: split", split)
        self.tables_config = tuple(tables)
        self.optimizer_config = optimizer
        self.max_rows = max_rows
        self.split = split
        self.memory_budget = (
            None
            if memory_budget is None
            else parse_bytes("TableGroup: memory_budget", memory_budget)
        )
        self.seed = _base_seed() if seed is None else seed
        self.slab_configs = sorted(
            {table.slab for table in tables},
            key=lambda slab: slab.order,
        )
        self.optimizer_code = _code_of(optimizer)
        self.layout = layout_of(
            tables,
            [self.row_bytes(table.slab) for table in tables],
            self.memory_budget,
        )
        self._memory = memory_of("TableGroup", device)
        self._place()
        self._start_life_cycle()
        watch(self)

    def _place(self) -> None:
        """Makes the tensors, empty."""
        table_allocation.allocate(self, self._memory)
        mark_static(self._tensors())

    # -- state ---------------------------------------------------------------------------------

    def _tensors(self) -> list[Tensor]:
        """All tensors of the group; none of them ever changes its shape or address."""
        index = [self.buckets, self.scores, self.tables, self.slabs, self.free_rows, self.clock]
        index += [self.sketch, self.evicted]
        rows = [*self.weights, *self.generations, *self.state, self.row_clock, *self.pending]
        constants = [self.hyper, self.meta, self.row_meta, self.init_data, self.policy]
        return [*index, *rows, *constants]

    def slab_of(self, table: int) -> int:
        """The slab of a table's rows."""
        return self.slab_configs.index(self.tables_config[table].slab)

    def state_bytes(self, slab: SlabConfig) -> int:
        """Bytes of optimizer state of one row."""
        state = () if self.optimizer_config is None else self.optimizer_config.state
        return sum(tensor.row_bytes(slab.dim) for tensor in state)

    def row_bytes(self, slab: SlabConfig) -> int:
        """Bytes of weights, generation and optimizer state of one row."""
        return slab.dim * slab.dtype.itemsize + 4 + self.state_bytes(slab)

    def capacity_bound(self, table: int) -> int | None:
        """Ids that a table can never exceed; None: as many as there are rows."""
        if not self.layout.rows:
            return None
        row = self.layout.rows[table]
        bounds = []
        if row[PolicyColumn.CAPACITY] > 0 and row[PolicyColumn.ON_FULL] != OnFull.GROW:
            bounds.append(row[PolicyColumn.CAPACITY])
        if row.get(PolicyColumn.BUDGET, 0) > 0:
            bounds.append(row[PolicyColumn.BUDGET] // row[PolicyColumn.ID_BYTES])
        return min(bounds, default=None)

    @property
    def device(self) -> torch.device:
        """Where all tensors of the group lie."""
        return self._memory.device

    def to(self, device: torch.device) -> None:
        """Moves everything to another device: new tensors, the old ones are given back.

        Raises:
            RuntimeError: tables cannot lie there, or too little memory, or the group is a module's;
                nothing has been moved.
        """
        self._check_no_owner("to")
        self.become(self.on_device(device))

    def on_device(self, device: torch.device) -> TableGroup:
        """The group itself where it is there, or else a group with its content; see :meth:`to`."""
        memory = memory_of("TableGroup.to", device)
        if memory.device == self.device:
            return self
        moved = TableGroup.__new__(TableGroup)
        state = self.__getstate__()
        moved.__setstate__({**state, "arguments": {**state["arguments"], "device": memory.device}})
        moved.take_over(self)
        return moved

    def become(self, other: TableGroup) -> None:
        """Takes the place of its own content by that of another group, in one step."""
        check_own(self)
        self.__dict__.update(other.__dict__)

    def _check_no_owner(self, method: str) -> None:
        if self.owner is not None:
            raise RuntimeError(
                f"TableGroup.{method}: the group is part of a {self.owner}, which would not "
                f"follow: call the module's own {method}()"
            )

    def bind_memory(self, buckets: Sequence[int] = (), rows: Sequence[int] = ()) -> None:
        """After counts were written from outside; see :func:`torch_dynemb.ops.bind_group`."""
        self._memory.bind(self, buckets, rows)

    def end_step(self) -> None:
        """Ends a training step; see :func:`torch_dynemb.ops.end_step`."""
        self._memory.end_step(self)

    def release_memory(self) -> None:
        """Gives memory back beyond what the group holds."""
        self._memory.release(self)

    def add_table(self, table: TableConfig) -> int:
        """Adds a table, between training steps; see :func:`torch_dynemb.table.extension.extend`.

        Returns:
            Its number.

        Raises:
            ValueError: its name is taken, or its policy contradicts the group's budget.
            RuntimeError: the group is a module's.
        """
        check_tables("add_table", [table])
        self._check_no_owner("add_table")
        self.become(table_extension.extend(self, table))
        return len(self.tables_config) - 1

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Gives the tables another optimizer; see :func:`torch_dynemb.table.extension.reoptimize`.

        Raises:
            TypeError: ``config`` is no optimizer config.
            RuntimeError: the group is a module's.
        """
        self._check_no_owner("set_optimizer")
        self.become(table_extension.reoptimize(self, config))

    @property
    def rows(self) -> Rows:
        """The row tensors in the order in which ops take them."""
        return Rows(
            self.weights,
            self.generations,
            self.state,
            self.row_clock,
            self.hyper,
            self.row_meta,
            self.init_data,
            self.pending,
        )

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return [table.name for table in self.tables_config]

    # -- lookup --------------------------------------------------------------------------------

    def find(self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int]) -> ops.FoundIds:
        """Handles of ids; see :func:`torch_dynemb.ops.find`."""
        return ops.find(self.buckets, self.tables, self.meta, ids, offsets, feature_tables)

    def find_or_insert(
        self,
        ids: Tensor,
        offsets: Tensor,
        feature_tables: Sequence[int],
        feature_policies: Sequence[int] | None = None,
        *,
        scores: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Handles of ids; new ids get a row, if their policy lets them.

        See :func:`torch_dynemb.ops.find_or_insert_`.

        Args:
            feature_policies: rows of ``policy``; default: those of the tables.
            scores: int64 [N], custom scores of the ids.
            counts: int64 [N], how often each id occurs, at least 1; default: once where it stands.

        Raises:
            ValueError: a table keeps custom scores, and none have been given.
        """
        if counts is not None:
            ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            handles = self.find_or_insert(
                ids.repeat_interleave(counts),
                ends[offsets],
                feature_tables,
                feature_policies,
                scores=None if scores is None else scores.repeat_interleave(counts),
            )
            return handles[ends[:-1]]
        if self.forked:
            check_own(self)
        self._check_custom_scores(feature_tables, ids, scores)
        if feature_policies is None:
            feature_policies = list(feature_tables) if self.layout.rows else []
        before = self._evicted_before()
        handles = ops.find_or_insert_(
            self.buckets,
            self.scores,
            self.tables,
            self.slabs,
            self.free_rows,
            self.sketch,
            self.evicted,
            self.meta,
            self.policy,
            self.clock,
            ids,
            offsets,
            self._admitted_by_hooks(ids, offsets, feature_tables),
            feature_tables,
            feature_policies,
        )
        if scores is not None:
            ops.set_scores_(
                self.buckets,
                self.scores,
                self.tables,
                self.meta,
                ids,
                offsets,
                feature_tables,
                scores,
                word=self.layout.word("custom"),
            )
        self._keep_evicted_rows(before)
        return handles

    def _config(self, table: int, call: str = "TableGroup") -> TableConfig:
        number = integer(f"{call}: table", table, what="the number of a table, int")
        if not 0 <= number < len(self.tables_config):
            raise IndexError(
                f"{call}: table is {number}, expected 0 to {len(self.tables_config) - 1}"
            )
        return self.tables_config[number]

    def _one_table(
        self, table: int, ids: Tensor, call: str = "TableGroup"
    ) -> tuple[Tensor, Tensor, list[int]]:
        self._config(table, call)
        return flat_int64(f"{call}: ids", ids, self.device), self.one_bag, [int(table)]

    def insert(self, table: int, ids: Tensor, *, scores: Tensor | None = None) -> Tensor:
        """Gives rows to ids, int64 of any shape, of one table; returns handles int64 [n].

        The table's policy decides as in training.
        """
        return self.find_or_insert(*self._one_table(table, ids, "insert"), scores=scores)

    def contains(self, table: int, ids: Tensor) -> Tensor:
        """Which ids are in a table: bool of the shape of ``ids``."""
        found = self.find(*self._one_table(table, ids, "contains")).handles
        return (found >= 0).reshape(ids.shape)

    def erase(self, table: int, ids: Tensor) -> int:
        """Removes ids from a table; returns how many were there. Later ids reuse their rows."""
        check_own(self)
        erased = ops.erase_(
            self.buckets,
            self.scores,
            self.tables,
            self.slabs,
            self.free_rows,
            self.meta,
            *self._one_table(table, ids, "erase"),
        )
        return int(erased[table])

    def reserve(self, table: int, ids: int) -> None:
        """Grows a table's index once, so that ``ids`` ids fit without another growth."""
        self._config(table, "reserve")
        ids = integer("reserve: ids", ids, least=0)
        check_own(self)
        ops.grow_(self.buckets, self.scores, self.tables, self.meta, table, ids)

    # -- sizes ---------------------------------------------------------------------------------

    def size(self, table: int) -> int:
        """Number of ids in a table."""
        self._config(table, "size")
        return int(self.tables[table, Table.SIZE])

    def sizes(self) -> dict[str, int]:
        """Number of ids by table name."""
        return {name: self.size(table) for table, name in enumerate(self.names)}

    def used_rows(self, slab: int) -> int:
        """Rows of a slab that have ever had an owner."""
        return int(self.slabs[slab, Slab.NEXT_ROW])

    def memory(self) -> dict[str, int]:
        """Bytes in use: ``rows`` (with generations), ``state``, ``index``, ``total``.

        ``index`` includes scores and what admission counts.
        """
        rows = state = 0
        for s, slab in enumerate(self.slab_configs):
            of_row = self.state_bytes(slab)
            rows += self.used_rows(s) * (self.row_bytes(slab) - of_row)
            state += self.used_rows(s) * of_row
        buckets = self.tables[:, Table.BUCKET_COUNT]
        scored = int(buckets[: len(self.tables_config)].sum())
        index = 8 * BUCKET_WORDS * int(buckets.sum()) + 8 * int(
            self.slabs[:, Slab.FREE_COUNT].sum()
        )
        index += 8 * BUCKET_WIDTH * len(self.layout.score_words) * scored + 4 * self.sketch.numel()
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

        Ctrl-C waits until it is done. Where it fails midway, such as for want of memory, no ids are
        left.

        Raises:
            ValueError: ``tensors`` is not the state of a group like this one, or is damaged;
                nothing has been changed.
        """
        check_own(self)
        table_state.load(self, table_state.in_own_order(self, tensors))

    def fill_state(self, tensors: Mapping[str, Tensor]) -> None:
        """As :meth:`load_state_tensors`, for a new group that nobody sees where it fails."""
        tensors = table_state.in_own_order(self, tensors)
        table_state.check(self, tensors)
        table_state.write(self, tensors)

    def constructor_arguments(self) -> dict[str, Any]:
        """What makes an equal, empty group."""
        return {
            "tables": self.tables_config,
            "optimizer": self.optimizer_config,
            "max_rows": self.max_rows,
            "memory_budget": self.memory_budget,
            "seed": self.seed,
            "device": self.device,
            "split": self.split,
        }

    def __getstate__(self) -> dict[str, Any]:
        return {
            "arguments": self.constructor_arguments(),
            "state": self.state_tensors(),
            "hyper": self.hyper.clone(),
            "batch_scored": sorted(self._batch_scored),
            "proposed_now": None if self.proposed_now is None else int(self.proposed_now),
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(**saved["arguments"])  # type: ignore[misc]
        self.fill_state(saved["state"])
        self.hyper.copy_(saved["hyper"])
        self._batch_scored = set(saved["batch_scored"])
        if saved.get("proposed_now") is not None:
            self._propose(saved["proposed_now"])

    def __deepcopy__(self, memo: dict[int, Any]) -> TableGroup:
        copy = TableGroup.__new__(TableGroup)
        memo[id(self)] = copy
        copy.__setstate__(self.__getstate__())
        return copy


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


__all__ = [
    "EvalDefault",
    "ExportedRows",
    "TableConfig",
    "TableGroup",
    "handle_rows",
    "pooling_of",
]
