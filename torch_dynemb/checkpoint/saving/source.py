"""What a save reads of a group of tables: the tables themselves, or copies of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.checkpoint.saving.stored_rows import StoredRows
from torch_dynemb.ops.columns import SKETCH_ROWS, Clock, Meta, PolicyColumn, Slab
from torch_dynemb.ops.tensors import IndexTensors, RowTensors
from torch_dynemb.storage.host import HostMemory
from torch_dynemb.table.group_config import GroupConfig
from torch_dynemb.table.preserved_rows import PreservedRows, can_preserve
from torch_dynemb.table.row_access import materialize, state_tensors
from torch_dynemb.table.tables import Tables


class SlabRows(NamedTuple):
    """The used rows of a slab.

    Attributes:
        used: how many there are.
        weights: [rows, dim].
        generations: int32 [rows].
        state: optimizer state by name: [rows] or [rows, columns].
        free: int64 [n], handles of rows that no id has.
        in_store: what reads the rows piece by piece, where they lie in a store; the tensors have no
            rows then.
        preserved: what reads them while training goes on, where no copies are made; the weights and
            the state have no rows then.
    """

    used: int
    weights: Tensor
    generations: Tensor
    state: dict[str, Tensor]
    free: Tensor
    in_store: StoredRows | None
    preserved: PreservedRows | None = None

    @property
    def reader(self) -> StoredRows | PreservedRows | None:
        """What reads the rows, where they are not in the tensors."""
        return self.preserved if self.in_store is None else self.in_store

    @property
    def row_bytes(self) -> int:
        """Bytes of weights and state of a row."""
        tensors = [self.weights, *self.state.values()]
        return sum(tensor.shape[1:].numel() * tensor.element_size() for tensor in tensors)


class IndexTable(NamedTuple):
    """The buckets of a table that are in use.

    Attributes:
        buckets: int64 [buckets, 8], four keys and four stored words each.
        scores: int64 [buckets, 4 * words]; no columns where nothing is kept.
    """

    buckets: Tensor
    scores: Tensor


class RowConstants(NamedTuple):
    """What initial rows are computed from, of the CPU.

    Attributes:
        meta: int64 [tables, 16].
        init_data: float64 [numbers].
    """

    meta: Tensor
    init_data: Tensor


class GroupSource(NamedTuple):
    """A group of tables as it is at one time.

    Attributes:
        config: of the group.
        buckets_of: by table, and then by table of counted ids.
        slabs: by slab.
        tables, slab_counts, clock, row_clock: of the CPU; see ``ops.IndexTensors``.
        seeds: int64 [tables], of the CPU.
        hyper: float64 [tables, 24], of the CPU.
        sketch: int32 [cells].
        now: seconds of the lookups that follow, as far as this rank knows.
        unwritten: rows of ids that were never trained may have no values yet, which
            :func:`write_initial_rows` computes from this; None: all have.
    """

    config: GroupConfig
    buckets_of: list[IndexTable]
    slabs: list[SlabRows]
    tables: Tensor
    slab_counts: Tensor
    clock: Tensor
    row_clock: Tensor
    seeds: Tensor
    hyper: Tensor
    sketch: Tensor
    now: int
    unwritten: RowConstants | None


def source_of(tables: Tables, *, to_be_copied: bool = False) -> GroupSource:
    """What a group holds: the tensors themselves, of which small ones are copies.

    Args:
        tables: of the group.
        to_be_copied: the large tensors will be copied, too, but rows that can be read while
            training goes on. Then rows that have no values yet get them in the copies, which takes
            a scan of the index that training need not wait for; on a GPU, whose kernels no copy
            meets, they get them at once.
    """
    later = to_be_copied and isinstance(tables.memory, HostMemory)
    preserved = PreservedRows(tables) if to_be_copied and can_preserve(tables) else None
    if not later:
        materialize(tables)
    config, index, rows = tables.config, tables.index, tables.rows
    parts = []
    for t in range(index.tables.shape[0]):
        active = index.active_buckets(t)
        scored = bool(config.layout.score_words) and t < len(config.tables)
        scores = index.scores[active] if scored else index.scores[:0]
        parts.append(IndexTable(index.buckets[active], scores))
    of_slabs = []
    in_store = StoredRows(tables)
    for s in range(len(config.slabs)):
        used, stored = index.used_rows(s), tables.stored(s) is not None
        here = 0 if stored or preserved is not None else used
        of_slabs.append(
            SlabRows(
                used,
                rows.weights[s][:here],
                rows.generations[s][: 0 if stored else used],
                {name: tensor[:here] for name, tensor in state_tensors(tables, s).items()},
                index.free_rows[s, : int(index.slabs[s, Slab.FREE_COUNT])],
                in_store if stored else None,
                preserved,
            )
        )
    small = (index.tables, index.slabs, index.clock, rows.row_clock, index.meta[:, 0], rows.hyper)
    counts, slab_counts, clock, row_clock, seeds, hyper = (t.detach().cpu().clone() for t in small)
    return GroupSource(
        config,
        parts,
        of_slabs,
        counts,
        slab_counts,
        clock,
        row_clock,
        seeds,
        hyper,
        index.sketch,
        next_now(tables),
        RowConstants(rows.meta.clone(), rows.init_data.clone())
        if later and preserved is None
        else None,
    )


def next_now(tables: Tables) -> int:
    """Seconds of the lookups that follow, as far as this rank knows.

    Args:
        tables: of the group.
    """
    proposed = tables.host.proposed_now
    return max(int(tables.index.clock[Clock.NOW]), 0 if proposed is None else int(proposed))


def sketch_cells(config: GroupConfig, sketch: Tensor, table: int) -> Tensor | None:
    """The counting sketch of a table, int32 [rows, width]; None: it has none.

    Args:
        config: of the group.
        sketch: int32 [cells], of the group.
        table: its number.
    """
    rows = config.layout.rows
    width = rows[table].get(PolicyColumn.SKETCH_WIDTH, 0) if rows else 0
    if width == 0:
        return None
    begin = rows[table][PolicyColumn.SKETCH_BEGIN]
    return sketch[begin : begin + SKETCH_ROWS * width].reshape(SKETCH_ROWS, width)


def write_initial_rows(source: GroupSource) -> None:
    """Gives rows of copies the values that they lack."""
    if source.unwritten is None:
        return
    slabs = source.slabs
    state = [slab.state[name] for name in (slabs[0].state if slabs else ()) for slab in slabs]
    none = source.tables.new_empty(0)
    for t in range(len(source.config.tables)):
        buckets = source.buckets_of[t].buckets
        meta = source.unwritten.meta[t : t + 1].clone()  # of an index with this table alone
        meta[:, Meta.REGION_BEGIN], meta[:, Meta.REGION_BUCKETS] = 0, buckets.shape[0]
        ops.materialize_(
            IndexTensors.read_only(buckets, source.tables[t : t + 1], meta),
            RowTensors(
                [slab.weights for slab in slabs],
                [slab.generations for slab in slabs],
                state,
                none,
                source.hyper[t : t + 1],
                meta,
                source.unwritten.init_data,
                [],
            ),
        )


__all__ = [
    "GroupSource",
    "IndexTable",
    "RowConstants",
    "SlabRows",
    "next_now",
    "sketch_cells",
    "source_of",
    "write_initial_rows",
]
