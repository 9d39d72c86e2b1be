"""Settings of a group of tables: its tables, their optimizer, and its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch_dynemb.argument_checks import flag, integer
from torch_dynemb.distributed.seed import common_seed
from torch_dynemb.ops.columns import MAX_ROWS, SLOT_COLUMNS, OnFull, PolicyColumn
from torch_dynemb.ops.update import APPLIES_DELAYED, NO_OPTIMIZER
from torch_dynemb.optim.base import OptimizerConfig, check_config
from torch_dynemb.policy.admission import AdmitBy, parse_bytes
from torch_dynemb.policy.layout import PolicyLayout, layout_of
from torch_dynemb.storage.tiers import HostStore, Storage
from torch_dynemb.table.config import SlabConfig, TableConfig, check_tables
from torch_dynemb.table.options import GroupOptions

# Bytes in memory of a tiered row: its place in the cache, and its place in the store.
TIERED_ROW_BYTES = 12
# A slot in the cache without its row: its entries in ``slots`` and ``free_slots``.
SLOT_BYTES = 8 * SLOT_COLUMNS + 4


@dataclass(frozen=True, eq=False)
class GroupConfig:
    """Settings of a group, from which its tensors are made; see :class:`torch_dynemb.TableGroup`.

    Attributes:
        tables: at least one; their names differ.
        optimizer: of the rows; None: they are only read.
        max_rows: rows to reserve for each slab; None: chosen from capacities and memory.
        memory_budget: bytes that the tables may take together; None: no limit.
        seed: of the initial values.
        split: whether gradients wait for the optimizer's ``step()``.
        slabs: kinds of rows (dim, dtype, tiered) in the order of their tensors.
        storage: of the tables that have one; None: all rows are in the memory of the device.
        layout: the policies as kernels read them.
        hooked: by table, whether a hook decides on admission.
        optimizer_code: argument of lookups, see :func:`torch_dynemb.ops.embedding`.

    Raises:
        TypeError, ValueError: a wrong value, or tables that do not fit together.
    """

    tables: tuple[TableConfig, ...]
    optimizer: OptimizerConfig | None
    max_rows: int | None
    memory_budget: int | None
    seed: int
    split: bool
    slabs: tuple[SlabConfig, ...] = field(init=False)
    storage: Storage | None = field(init=False)
    layout: PolicyLayout = field(init=False)
    hooked: tuple[bool, ...] = field(init=False)
    optimizer_code: int = field(init=False)

    def __post_init__(self) -> None:
        for name, count in Counter(self.names).items():
            if count > 1:
                raise ValueError(
                    f"TableGroup: {count} tables are named {name!r}: give each another name"
                )
        slabs = sorted({table.slab for table in self.tables}, key=lambda slab: slab.order)
        object.__setattr__(self, "slabs", tuple(slabs))
        object.__setattr__(self, "storage", _common_storage(self.tables))
        for table in self.tables:
            check_stored_gradients(
                f"TableGroup: table {table.name!r}", table.storage, self.optimizer
            )
        row_bytes = [self.memory_row_bytes(table.slab) for table in self.tables]
        object.__setattr__(self, "layout", layout_of(self.tables, row_bytes, self.memory_budget))
        hooked = (isinstance(table.policy.admission, AdmitBy) for table in self.tables)
        object.__setattr__(self, "hooked", tuple(hooked))
        object.__setattr__(self, "optimizer_code", _code_of(self.optimizer))

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return [table.name for table in self.tables]

    @cached_property
    def split_slabs(self) -> list[int]:
        """Numbers of the slabs with a ``HostStore``: their rows may lie in host memory."""
        beyond = {table.slab for table in self.tables if isinstance(table.storage, HostStore)}
        return [number for number, slab in enumerate(self.slabs) if slab in beyond]

    @property
    def caches_hosted(self) -> bool:
        """Whether a GPU caches the rows of ``split_slabs``."""
        return isinstance(self.storage, HostStore) and self.storage.cache_size is not None

    @cached_property
    def keeps_time(self) -> bool:
        """Whether a table stores timestamps, expiry times or counts that decay by seconds."""
        words = self.layout.score_words
        by_seconds = any(
            max(table.policy.half_life_ticks, table.policy.admission_ticks) > 0
            for table in self.tables
        )
        return by_seconds or "timestamp" in words or "expiry" in words

    def slab_of(self, table: int) -> int:
        """Return the slab of a table's rows."""
        return self.slabs.index(self.tables[table].slab)

    def state_bytes(self, slab: SlabConfig) -> int:
        """Return the bytes of optimizer state of one row."""
        state = () if self.optimizer is None else self.optimizer.state
        return sum(tensor.row_bytes(slab.dim) for tensor in state)

    def row_bytes(self, slab: SlabConfig) -> int:
        """Return the bytes of weights, generation and optimizer state of one row."""
        return slab.dim * slab.dtype.itemsize + 4 + self.state_bytes(slab)

    def memory_row_bytes(self, slab: SlabConfig) -> int:
        """Return the bytes of memory per row, without the memory of a cache."""
        return TIERED_ROW_BYTES if slab.tiered else self.row_bytes(slab)

    def capacity_bound(self, table: int) -> int | None:
        """Return the number of ids that a table can never exceed; None: bounded by rows alone."""
        if not self.layout.rows:
            return None
        row = self.layout.rows[table]
        bounds = []
        if row[PolicyColumn.CAPACITY] > 0 and row[PolicyColumn.ON_FULL] != OnFull.GROW:
            bounds.append(row[PolicyColumn.CAPACITY])
        if row.get(PolicyColumn.BUDGET, 0) > 0:
            bounds.append(row[PolicyColumn.BUDGET] // row[PolicyColumn.ID_BYTES])
        return min(bounds, default=None)

    def arguments(self) -> dict[str, Any]:
        """Return arguments of :class:`torch_dynemb.TableGroup` that make an equal, empty group."""
        return {
            "tables": self.tables,
            "optimizer": self.optimizer,
            "max_rows": self.max_rows,
            "memory_budget": self.memory_budget,
            "seed": self.seed,
            "split": self.split,
        }


def check_stored_gradients(
    owner: str, storage: Storage | None, optimizer: OptimizerConfig | None
) -> None:
    """Check that rows with a cached storage are in memory when their gradients arrive.

    Args:
        owner: beginning of an error's message.
        storage: of a table, or None.
        optimizer: of its rows, or None.

    Raises:
        ValueError: gradients may arrive steps after the lookup, when the rows have left memory.
    """
    moves = not isinstance(storage, HostStore) or storage.cache_size is not None
    if storage is None or not moves or optimizer is None:
        return
    if optimizer.delayed_gradients != "apply":
        return
    raise ValueError(
        f"{owner} has storage {storage} and an optimizer with delayed_gradients='apply', but rows "
        "stay in their place only until the end of the step that looks them up, so later gradients "
        "would be lost: leave delayed_gradients 'raise', or storage out"
    )


def _common_storage(tables: tuple[TableConfig, ...]) -> Storage | None:
    """Return the storage of the tables that have one.

    Raises:
        ValueError: two differ, or only some of the tables that share a tensor have a HostStore.
    """
    given = [table for table in tables if table.storage is not None]
    for table in given:
        if not isinstance(table.storage, HostStore):
            continue
        for other in tables:
            if other.storage is None and other.slab == table.slab:
                raise ValueError(
                    f"TableGroup: table {table.name!r} has storage {table.storage}, but table "
                    f"{other.name!r} has none: their rows have the same dim and dtype and lie in "
                    "one tensor, so give both the same storage, or put them into two modules"
                )
    for table in given:
        if table.storage != given[0].storage:
            raise ValueError(
                f"TableGroup: tables {given[0].name!r} and {table.name!r} have different storage, "
                f"{given[0].storage} and {table.storage}: tables of one group share a store, so "
                "give them the same, or put them into two modules"
            )
    return given[0].storage if given else None


def _code_of(optimizer: OptimizerConfig | None) -> int:
    if optimizer is None:
        return NO_OPTIMIZER
    code = optimizer.kernel_number
    return code + APPLIES_DELAYED if optimizer.delayed_gradients == "apply" else code


def checked_config(
    tables: Sequence[TableConfig],
    optimizer: OptimizerConfig | None,
    seed: int | None,
    options: GroupOptions,
) -> GroupConfig:
    """Return the config for the arguments of :class:`torch_dynemb.TableGroup`.

    Raises:
        TypeError, ValueError: a wrong value, or tables that do not fit together.
    """
    tables = check_tables("TableGroup", tables)
    if optimizer is not None:
        check_config("TableGroup: optimizer", optimizer)
    max_rows, memory_budget = options["max_rows"], options["memory_budget"]
    if max_rows is not None:
        max_rows = integer("TableGroup: max_rows", max_rows, what="int or None")
        if not 0 < max_rows <= MAX_ROWS:
            raise ValueError(
                f"TableGroup: max_rows is {max_rows}, expected 1 to {MAX_ROWS}, or None"
            )
    if seed is not None:
        seed = integer("TableGroup: seed", seed, most=(1 << 64) - 1, what="int or None")
    split = flag("TableGroup: split", options["split"])
    budget = None
    if memory_budget is not None:
        budget = parse_bytes("TableGroup: memory_budget", memory_budget)
    common = common_seed() if seed is None else seed
    return GroupConfig(tables, optimizer, max_rows, budget, common, split)


__all__ = [
    "SLOT_BYTES",
    "TIERED_ROW_BYTES",
    "GroupConfig",
    "check_stored_gradients",
    "checked_config",
]
