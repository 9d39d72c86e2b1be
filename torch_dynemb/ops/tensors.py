"""Records of tensors that ops take: the tables of a group, and the batch of a lookup.

Tensors of tables form two sets that never overlap: lookups change the index, and backwards change
the rows. ``meta``, ``policy``, ``hyper`` and ``init_data`` are constants to both. A program may use
other tensors of these shapes: ops know nothing else of a table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from torch_dynemb.ops.columns import Meta, Pooling, Slab, Table


class IndexTensors(NamedTuple):
    """Ids and their handles, changed by training lookups.

    ``T`` tables have rows; ``C`` more count ids that wait for admission.

    Attributes:
        buckets: int64 [buckets, 8], four keys and four handles each.
        scores: int64 [buckets, 4 * words], scores of ids; without rows if none are kept.
        tables: int64 [T + C, 16], the state of each (``columns.Table``).
        slabs: int64 [slabs, 8], allocation of rows (``columns.Slab``).
        free_rows: int64 [slabs, rows], handles of the rows of erased ids; ``slabs`` has their
            number.
        sketch: int32 [cells], counts of ids that are not admitted yet.
        evicted: int64 [1 + records, 4], evicted ids (``columns.Evicted``).
        meta: int64 [T + C, 16], constants of each (``columns.Meta``).
        policy: int64 [policies, 21], constants (``columns.PolicyColumn``): one row for each table,
            then those of features; without rows if the group has no policy.
        clock: int64 [2 + T + C] (``columns.Clock``).
    """

    buckets: Tensor
    scores: Tensor
    tables: Tensor
    slabs: Tensor
    free_rows: Tensor
    sketch: Tensor
    evicted: Tensor
    meta: Tensor
    policy: Tensor
    clock: Tensor

    @classmethod
    def read_only(cls, buckets: Tensor, tables: Tensor, meta: Tensor) -> IndexTensors:
        """Make a record for :func:`torch_dynemb.ops.find`, with empty tensors where it reads none.

        Args:
            buckets, tables, meta: see :class:`IndexTensors`.
        """
        none = tables.new_empty(0)
        return cls(buckets, none, tables, none, none, none, none, meta, none, none)

    def active_buckets(self, table: int) -> slice:
        """Return the buckets of a table in ``buckets`` and ``scores``; waits for a GPU.

        Args:
            table: 0 to ``T + C - 1``.
        """
        begin = int(self.meta[table, Meta.REGION_BEGIN])
        return slice(begin, begin + int(self.tables[table, Table.BUCKET_COUNT]))

    def used_rows(self, slab: int) -> int:
        """Return the rows of a slab that have ever had an owner; waits for a GPU.

        Args:
            slab: 0 to the number of slabs - 1.
        """
        return int(self.slabs[slab, Slab.NEXT_ROW])


class RowTensors(NamedTuple):
    """Rows of ids: read by lookups, changed by their backwards.

    Attributes:
        weights: float32, bfloat16 or float16 [rows, dim], one for each slab.
        generations: int32 [rows], one for each slab: generations of the handles that own the rows.
        state: optimizer state. Of a row: float32 or int32 [rows]. Of its weights: float32 or
            bfloat16 [rows, dim], or uint8 [rows, bytes] where 8 bits are kept of each. Tensor k of
            slab s is at index k * slabs + s.
        dirty_bits: uint8 [rows], one for each slab where changes are recorded, else none: 255 for a
            row that has been written.
        copy_on_write: int64 [words], one for each slab after the first save that reads rows in a
            thread (``columns.CopyOnWrite``), else none.
        row_clock: int64 [T + 4] (``columns.RowClock``).
        hyper: float64 [T, 24], hyper-parameters (``columns.Hyper``).
        meta: int64 [T, 16], constants of the tables (``columns.Meta``).
        init_data: float64 [numbers], records of initializers, and their vectors.
        pending: gradients between backward and step in split mode, see
            :class:`torch_dynemb.ops.PendingGradients`; empty: the backward updates the rows.
    """

    weights: list[Tensor]
    generations: list[Tensor]
    state: list[Tensor]
    dirty_bits: list[Tensor]
    copy_on_write: list[Tensor]
    row_clock: Tensor
    hyper: Tensor
    meta: Tensor
    init_data: Tensor
    pending: list[Tensor]

    @property
    def read(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """Return the tensors for ops that only read rows."""
        return self.weights, self.generations, self.meta, self.init_data

    @property
    def updated(self) -> tuple[Any, ...]:
        """Return the tensors for ops that update rows: all but ``pending``."""
        return self[:-1]


class LookupBatch(NamedTuple):
    """Ids of one lookup, for F features of B bags each, and the treatment of their rows.

    Attributes:
        ids: int64 [N], feature after feature.
        offsets: int64 [F * B + 1], ascending from 0 to N: where the bags begin. May be empty with
            one feature and no pooling.
        per_sample_weights: float32 [N], factors of the rows, or None; None without pooling.
        feature_tables: F numbers of tables, from 0.
        feature_dims: the dim of each of these tables; without pooling all are equal.
        pooling: a ``columns.Pooling``: 0 sums the rows of a bag, 1 takes their mean (weighted if
            there are weights), 2 returns a row for each id.
    """

    ids: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    feature_tables: list[int]
    feature_dims: list[int]
    pooling: int

    @classmethod
    def of_rows(
        cls, ids: Tensor, offsets: Tensor, feature_tables: list[int], dim: int
    ) -> LookupBatch:
        """Ask for a row for each id.

        Args:
            ids, offsets, feature_tables: see :class:`LookupBatch`.
            dim: of all these tables.
        """
        dims = [dim] * len(feature_tables)
        return cls(ids, offsets, None, feature_tables, dims, Pooling.NONE)

    @property
    def index_arguments(self) -> tuple[Tensor, Tensor, list[int]]:
        """Return the arguments of index ops: ``ids``, ``offsets`` and ``feature_tables``."""
        return self.ids, self.offsets, self.feature_tables

    def detached(self) -> LookupBatch:
        """Return the same batch with weights that get no gradient."""
        if self.per_sample_weights is None:
            return self
        return self._replace(per_sample_weights=self.per_sample_weights.detach())


class TierTensors(NamedTuple):
    """Places of the rows of tiered tables, changed by lookups and prefetches.

    For slabs with all rows in memory, all but ``clock`` have no elements.

    Attributes:
        places: int32 [rows], one for each slab: the row's slot in the cache + 1; 0: not in the
            cache.
        slots: int64 [slots, 4], one for each slab: the rows that they have (``columns.Slot``).
        free_slots: int32 [slots], one for each slab: a stack of ``Tier.FREE_COUNT`` free slots.
        clock: int64 [1 + slabs, 16]: of the group (``columns.TierHead``), then of each slab
            (``columns.Tier``).
    """

    places: list[Tensor]
    slots: list[Tensor]
    free_slots: list[Tensor]
    clock: Tensor


__all__ = ["IndexTensors", "LookupBatch", "RowTensors", "TierTensors"]
