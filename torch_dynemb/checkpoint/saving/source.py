"""Source of a save: the tables of a group, or copies of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.checkpoint.saving.stored_rows import StoredRows
from torch_dynemb.ops.columns import Meta
from torch_dynemb.ops.tensors import IndexTensors, RowTensors
from torch_dynemb.storage.host import HostMemory
from torch_dynemb.table.clock import next_now
from torch_dynemb.table.copy_on_write import CopyOnWriteRows, can_copy_on_write
from torch_dynemb.table.group_config import GroupConfig
from torch_dynemb.table.row_access import as_kept, materialize, state_tensors
from torch_dynemb.table.state import clamp_counts, used_tensors
from torch_dynemb.table.tables import Tables


class SlabRows(NamedTuple):
    """Used rows of a slab.

    Attributes:
        used: number of rows.
        weights: [rows, dim].
        generations: int32 [rows].
        state: optimizer state by name: [rows] or [rows, columns].
        in_store: reader of rows that lie in a store; the tensors have no rows then.
        copy_on_write: reader of rows during training, if they are not copied; weights and state
            have no rows then.
    """

    used: int
    weights: Tensor
    generations: Tensor
    state: dict[str, Tensor]
    in_store: StoredRows | None
    copy_on_write: CopyOnWriteRows | None = None

    @property
    def reader(self) -> StoredRows | CopyOnWriteRows | None:
        """Reader of the rows, if they are not in the tensors."""
        return self.copy_on_write if self.in_store is None else self.in_store

    @property
    def row_bytes(self) -> int:
        """Bytes of weights and state of a row."""
        tensors = [self.weights, *self.state.values()]
        return sum(tensor.shape[1:].numel() * tensor.element_size() for tensor in tensors)


class RowConstants(NamedTuple):
    """Inputs of initial rows, on the CPU.

    Attributes:
        meta: int64 [tables, 16].
        init_data: float64 [numbers].
    """

    meta: Tensor
    init_data: Tensor


class GroupSource(NamedTuple):
    """State of a group of tables at one time.

    Attributes:
        config: config of the group.
        entries: entries of ``table.state``, without rows; small ones are on the CPU.
        slabs: rows by slab.
        hyper: float64 [tables, 24], on the CPU.
        now: seconds of the next lookups, as far as this rank knows.
        unwritten: inputs for :func:`write_initial_rows`, if rows of untrained ids may lack values;
            None if all rows have values.
    """

    config: GroupConfig
    entries: dict[str, Tensor]
    slabs: list[SlabRows]
    hyper: Tensor
    now: int
    unwritten: RowConstants | None

    @property
    def tables(self) -> Tensor:
        """See ``ops.IndexTensors``."""
        return self.entries["tables"]

    def buckets(self, table: int) -> Tensor:
        """Return the buckets in use, int64 [buckets, 8]: four keys and four stored words each.

        Args:
            table: number of the table.
        """
        return self.entries[f"{self.config.names[table]}.buckets"]

    def scores(self, table: int) -> Tensor:
        """Return their scores, int64 [buckets, 4 * words]; empty if none are kept.

        Args:
            table: number of the table.
        """
        none = self.buckets(table)[:0]
        return self.entries.get(f"{self.config.names[table]}.scores", none)


def source_of(tables: Tables, *, to_be_copied: bool = False) -> GroupSource:
    """Collect the state of a group. Large tensors are shared, small ones copied.

    Args:
        tables: tables of the group.
        to_be_copied: whether the caller will copy large tensors, except rows that can be read
            during training. Then missing initial values are written into the copies, so that
            training need not wait for a scan of the index. On a GPU they are written at once,
            because its kernels do not run on copies.
    """
    later = to_be_copied and isinstance(tables.memory, HostMemory)
    copy_on_write = CopyOnWriteRows(tables) if to_be_copied and can_copy_on_write(tables) else None
    if not later:
        materialize(tables)
    config, index, rows = tables.config, tables.index, tables.rows
    of_slabs = []
    in_store = StoredRows(tables)
    for s in range(len(config.slabs)):
        used, stored = index.used_rows(s), tables.stored(s) is not None
        here = 0 if stored or copy_on_write is not None else used
        of_slabs.append(
            SlabRows(
                used,
                rows.weights[s][:here],
                rows.generations[s][: 0 if stored else used],
                {name: tensor[:here] for name, tensor in state_tensors(tables, s).items()},
                in_store if stored else None,
                copy_on_write,
            )
        )
    entries = dict(used_tensors(tables, rows=False))
    for name in ("tables", "slabs", "clock", "row_clock", "seeds"):
        entries[name] = entries[name].detach().cpu().clone()
    clamp_counts(entries)
    return GroupSource(
        config,
        entries,
        of_slabs,
        rows.hyper.detach().cpu().clone(),
        next_now(tables),
        RowConstants(rows.meta.clone(), rows.init_data.clone())
        if later and copy_on_write is None
        else None,
    )


def write_initial_rows(source: GroupSource) -> None:
    """Write missing initial values into copied rows."""
    if source.unwritten is None:
        return
    slabs = source.slabs
    kept = [as_kept(source.config.optimizer, slab.state) for slab in slabs]
    state = [of_slab for tensor in zip(*kept, strict=True) for of_slab in tensor]
    none = source.tables.new_empty(0)
    for t in range(len(source.config.tables)):
        buckets = source.buckets(t)
        meta = source.unwritten.meta[t : t + 1].clone()  # describes an index with only this table
        meta[:, Meta.REGION_BEGIN], meta[:, Meta.REGION_BUCKETS] = 0, buckets.shape[0]
        ops.materialize_(
            IndexTensors.read_only(buckets, source.tables[t : t + 1], meta),
            RowTensors(
                [slab.weights for slab in slabs],
                [slab.generations for slab in slabs],
                state,
                [],
                [],
                none,
                source.hyper[t : t + 1],
                meta,
                source.unwritten.init_data,
                [],
            ),
        )


__all__ = [
    "GroupSource",
    "RowConstants",
    "SlabRows",
    "source_of",
    "write_initial_rows",
]
