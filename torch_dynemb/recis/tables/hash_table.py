"""RecIS's HashTable: the rows of one or several logical tables, as a module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import described, float_rows, integer
from torch_dynemb.distributed.ranks import RankGroup
from torch_dynemb.initializers import Constant, Initializer
from torch_dynemb.nn.inputs import flat_ids
from torch_dynemb.nn.optimized_later import OptimizedLater
from torch_dynemb.nn.rank_states import place_in_world
from torch_dynemb.ops import LookupBatch
from torch_dynemb.optim import OptimizerConfig
from torch_dynemb.policy.admission import AdmissionRule
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.recis.initializers import seed_of
from torch_dynemb.recis.not_offered import TABLE_METHODS
from torch_dynemb.recis.slices import Slice, gen_slice
from torch_dynemb.recis.tables.arguments import (
    check_grad_reduction,
    check_hash_table,
    check_storage_on,
    child_names,
    one_dimension,
    table_configs,
)
from torch_dynemb.recis.tables.children import ChildrenInfo, IdsMap
from torch_dynemb.recis.tables.hooks import READ_ONLY, AdmitHook, FilterHook, RowFilter
from torch_dynemb.recis.tables.insertion import rows_to_store
from torch_dynemb.recis.tables.packed_rows import unpack_int8
from torch_dynemb.recis.tables.shard import check_in_slice
from torch_dynemb.recis.tables.slots import EMBEDDING, SlotGroup, slot_group
from torch_dynemb.storage.tiers import Storage
from torch_dynemb.table import RowBatch, TableGroup
from torch_dynemb.table import lookup as table_lookup
from torch_dynemb.table.content import read_content
from torch_dynemb.table.pending_gradients import TableGradients, add_pending, read_pending
from torch_dynemb.table.row_access import handle_rows
from torch_dynemb.table.tables import Tables, one_table


class HashTable(OptimizedLater):
    """Rows of ids; gradients are pending until an optimizer (:class:`SparseAdam`) applies them.

    In training, a lookup gives an id a row. Otherwise an id without a row reads zeros. Several
    lookups may come before a step. The optimizer may be made after the first lookup.

    Args:
        embedding_shape: [dim].
        block_size: ids for which a child's index has room before it first grows.
        dtype: of the rows: float32, bfloat16, float16, or int8 with a scale per row, which only
            :meth:`insert` writes.
        device: of the rows.
        coalesced: whether there may be several children.
        children: names of the logical tables; each has its own ids. Default: ``[name]``.
        slice: this table's share of the ids, if others have the rest; :func:`gen_slice`.
        initializer: of new rows; default ``Constant(0)``.
        name: of the table.
        grad_reduce_by: reduction of gradients over ranks; see :class:`EmbeddingOption`.
        filter_hook: removes rows periodically, at the end of steps.
        admissions: rule for new ids by child; default: all get a row.
        trainable: False: rows are inserted and read, and have no optimizer.
        seed: of initial values; default: that of the initializer's generator, else torch's (of rank
            0 with a process group).
        now: start time in seconds, if ranks have slices of the table and agree on the time;
            default: the machine's clock.
        max_rows: rows to reserve address space for; see :class:`EmbeddingOption`.
        storage: store of this table's rows beyond those in memory; None: all are in memory.
            A trained table opens it when it gets its optimizer, and takes no ids before.

    Raises:
        TypeError, ValueError: a wrong value, several children without ``coalesced``, or ``storage``
            on another device than the CPU.
    """

    how_to_optimize = "give it to one, such as SparseAdam(filter_out_sparse_param(model))"
    _instead: ClassVar[Mapping[str, str]] = {**OptimizedLater._instead, **TABLE_METHODS}

    def __init__(
        self,
        embedding_shape: Sequence[int],
        block_size: int = 5,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        coalesced: bool = False,
        children: Sequence[str] | None = None,
        slice: Slice | None = None,  # noqa: A002 - RecIS's name
        initializer: Initializer | None = None,
        name: str = "hashtable",
        grad_reduce_by: str = "worker",
        filter_hook: FilterHook | None = None,
        *,
        admissions: Mapping[str, AdmissionRule] | None = None,
        trainable: bool = True,
        seed: int | None = None,
        now: int | None = None,
        max_rows: int | None = None,
        storage: Storage | None = None,
    ) -> None:
        check_storage_on("HashTable", storage, device)
        dim = one_dimension(embedding_shape)
        names = child_names(name, children, coalesced=coalesced)
        block_size = integer("HashTable: block_size", block_size, least=0)
        check_hash_table(slice, filter_hook, admissions)
        check_grad_reduction("HashTable", grad_reduce_by)
        packed = dtype == torch.int8
        row_filter = None if filter_hook is None else filter_hook.make()
        rules = dict(admissions or {})
        tables = table_configs(
            names,
            dim,
            dtype,
            initializer=Constant(0.0) if initializer is None else initializer,
            block_size=block_size,
            scores=() if row_filter is None else row_filter.scores,
            rules=rules,
        )
        super().__init__(
            name,
            tables,
            trainable=trainable and not packed,
            device=device,
            max_rows=max_rows,
            seed=seed_of(initializer) if seed is None else seed,
            storage=storage,
        )
        self.rank_group: RankGroup | None = None  # the ranks that share it, set by an engine
        self.embedding_dim = dim
        self.grad_reduce_by = grad_reduce_by
        self.slice = gen_slice() if slice is None else slice
        self.packed = packed
        self._coalesced = coalesced
        self._rules = rules
        self._filter = row_filter
        self._rebind_optimizer()  # steps filter rows from now on
        self._first_ids = min(block_size, max_rows or block_size)
        for child in range(len(names)):
            self._group.reserve(child, self._first_ids)
        if now is not None and self._group.config.keeps_time:
            self._group.clock.share(now)

    # -- optimizer -------------------------------------------------------------------------------

    @property
    def _sharing_ranks(self) -> RankGroup | None:
        """The ranks of an engine that share the rows; None: they are of this process alone."""
        return self.rank_group

    def _is_shared(self) -> bool:
        return self.rank_group is not None or not self.slice.whole

    def _step_end(self) -> Callable[[int | None], None]:
        row_filter: RowFilter | None = getattr(self, "_filter", None)
        if row_filter is None:
            return super()._step_end()
        return functools.partial(_end_step, self._group, row_filter)

    def _with_storage(self, optimizer: OptimizerConfig, storage: Storage) -> Tables:
        opened = super()._with_storage(optimizer, storage)
        for child in range(len(self._group.names)):
            ops.grow_(opened.index, child, self._first_ids)
        return opened

    def extra_repr(self) -> str:
        config = self._group.config.optimizer if self._has_optimizer else None
        return f"{self.name!r}, {self._group.sizes()}, dim={self.embedding_dim}, optimizer={config}"

    # -- lookup ----------------------------------------------------------------------------------

    def forward(
        self, ids: Tensor, admit_hook: AdmitHook | None = None, *, child: str | None = None
    ) -> Tensor:
        """Return rows of ids.

        Args:
            ids: int64 or int32 of any shape.
            admit_hook: ``AdmitHook("ReadOnly")``: new ids get no row. Other rules belong to the
                table.
            child: name of the logical table; required if there are several.

        Returns:
            float32, the shape of ids + (dim,).

        Raises:
            TypeError: ids are not integers, or ``admit_hook`` is not an AdmitHook.
            ValueError: unknown child, or a hook that differs from the table's.
        """
        batch = self._rows_of(flat_ids("HashTable", ids), child)
        rows = self.lookup(batch, reads_only=self._reads_only(admit_hook))
        if self.packed:
            rows = unpack_int8(rows, self.embedding_dim, torch.float32)
        return rows.reshape(*ids.shape, self.embedding_dim)

    @property
    def columns(self) -> int:
        """Columns of a stored row."""
        return self._group.config.tables[0].embedding_dim

    def lookup(
        self,
        batch: LookupBatch,
        *,
        reads_only: bool = False,
        trains: bool = True,
        counts: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> Tensor:
        """Look up ids of several features in one call; 8-bit rows are returned as stored.

        Args:
            batch: the lookup, in the tables of the children.
            reads_only: True: new ids get no row.
            trains: False: as in evaluation, but weights may get a gradient.
            counts: int64 [N], occurrences of each id; default: 1.
            scores: [N], custom scores, int64, or floats for decayed sums; default: those of
                ``group.scores.set_batch``.

        Returns:
            float32 [N, columns] without pooling, else [B, F * columns].

        Raises:
            RuntimeError: the table has storage and no optimizer yet.
        """
        self._check_stored("lookup")
        return self._lookup(
            batch, counts=counts, scores=scores, inserts=not reads_only, trains=trains
        )

    def prefetch(self, ids: Tensor, *, child: str | None = None) -> None:
        """Start to load rows of the next batch into memory, and return at once.

        Does nothing for a table without ``storage``. No rows are inserted.

        Args:
            ids: int64 or int32 of any shape.
            child: name of the logical table; required if there are several.

        Raises:
            TypeError: ids are not integers.
            ValueError: unknown child.
            RuntimeError: the storage has failed, or the table has no optimizer yet.
        """
        self.prefetch_lookup(self._rows_of(flat_ids("HashTable.prefetch", ids), child))

    def _rows_of(self, ids: Tensor, child: str | None) -> LookupBatch:
        """Return a lookup of one row for each id, int64 [n], of a child."""
        one_bag = self._group.tables.one_bag
        return LookupBatch.of_rows(ids, one_bag, [self._table(child)], self.columns)

    def _reads_only(self, hook: AdmitHook | None) -> bool:
        if hook is None:
            return False
        if not isinstance(hook, AdmitHook):
            raise TypeError(
                f"HashTable: admit_hook is {described(hook)}, expected an AdmitHook or None"
            )
        rule = hook.make()
        if rule == READ_ONLY:
            return True
        if any(rule != self._rules.get(child) for child in self.children_hashtable):
            raise ValueError(
                f"HashTable {self.name!r}: admit_hook is {hook}, but the rules of its children are "
                f"{self._rules}: a lookup can be ReadOnly, give other rules to the table"
            )
        return False

    @property
    def id_slots(self) -> int:
        """Number of slots into which ids are hashed; each rank has some."""
        return self.slice.slice_size

    @property
    def counts_occurrences(self) -> bool:
        """Whether lookups need the number of occurrences of ids, for a score or for admission."""
        tables = self._group.config.tables
        counted = {"frequency", "decayed"}
        return any(
            counted & set(t.policy.scores) or t.policy.admission or t.policy.combine == "sum"
            for t in tables
        )

    # -- content ---------------------------------------------------------------------------------

    @property
    def children_hashtable(self) -> list[str]:
        """Names of the children."""
        return self._group.names

    def children_info(self) -> ChildrenInfo:
        """Return the children, and whether there may be several."""
        return ChildrenInfo(self._group.names, self._coalesced)

    def _table(self, child: str | None) -> int:
        names = self._group.names
        if child is None and len(names) == 1:
            return 0
        if child not in names:
            raise ValueError(
                f"HashTable {self.name!r}: child is {child!r}, expected one of {names}"
            )
        return names.index(child)

    def _content(self, child: str | None) -> tuple[int, RowBatch]:
        table = self._table(child)
        self._group.materialize()
        return table, read_content(self._group.tables, table)

    def _float_rows(self, rows: Tensor) -> Tensor:
        if self.packed:
            return unpack_int8(rows, self.embedding_dim, torch.float32)
        return rows.to(torch.float32)

    def ids(self, child: str | None = None) -> Tensor:
        """Return the ids of a child.

        Args:
            child: its name; required if there are several.

        Returns:
            int64 [n], ascending.

        Raises:
            ValueError: unknown child.
        """
        return self._content(child)[1].ids

    def ids_map(self, child: str | None = None) -> IdsMap:
        """Return the ids of a child, and the numbers of their rows.

        Args:
            child: its name; required if there are several.

        Raises:
            ValueError: unknown child.
        """
        table, content = self._content(child)
        group = self._group
        found = group.find(*one_table(group.tables, table, content.ids)).handles
        return IdsMap(content.ids, handle_rows(found))

    def embeddings(self, child: str | None = None) -> Tensor:
        """Return the rows of a child.

        Args:
            child: its name; required if there are several.

        Returns:
            float32 [n, dim], in the order of :meth:`ids`.

        Raises:
            ValueError: unknown child.
        """
        return self._float_rows(self._content(child)[1].rows)

    def slot_group(self, child: str | None = None) -> SlotGroup:
        """Return ``embedding`` and optimizer state by name: [n, ...] in the order of :meth:`ids`.

        Its ``slot_by_name()`` returns them by row number.

        Args:
            child: its name; required if there are several.

        Raises:
            ValueError: unknown child.
        """
        table, content = self._content(child)
        by_id = {EMBEDDING: self._float_rows(content.rows), **content.state}
        return slot_group(self._group, table, by_id, self._float_rows)

    def insert(self, ids: Tensor, embeddings: Tensor, child: str | None = None) -> None:
        """Set rows of ids; new ids get a row whatever the admission rule is.

        Args:
            ids: int64 or int32 of any shape, n in all, distinct.
            embeddings: float [n, dim].
            child: its name; required if there are several.

        Raises:
            TypeError: dtypes do not match.
            ValueError: unknown child, shapes do not match, an id is repeated, or belongs to another
                slice.
            RuntimeError: the table has storage and no optimizer yet.
        """
        self._check_stored("insert")
        call, table, packed = "HashTable.insert", self._table(child), self.packed
        group, dim = self._group, self.embedding_dim
        given = rows_to_store(call, "embeddings", ids, embeddings, group, dim, packed=packed)
        check_in_slice(call, self.slice, given.ids)
        group.insert_or_assign(table, given.ids, given.rows)

    def clear(self, child: str | None = None) -> None:
        """Remove all ids, of one child or of all; later ids reuse their rows.

        Args:
            child: its name; None: all.

        Raises:
            ValueError: unknown child.
        """
        tables = range(len(self._group.names)) if child is None else [self._table(child)]
        with defer_signals():
            for table in tables:
                self._group.clear(table)

    # -- gradients -------------------------------------------------------------------------------

    def accept_grad(self, ids: Tensor, grad: Tensor, child: str | None = None) -> None:
        """Add gradients to the pending ones.

        In training, an id without a row gets one if the child's admission rule accepts it, as in a
        lookup. Gradients of other ids without a row are dropped.

        Args:
            ids: int64 or int32 of any shape, n in all.
            grad: float [n, dim].
            child: its name; required if there are several.

        Raises:
            TypeError: dtypes do not match.
            ValueError: unknown child, shapes do not match, the table is not trainable, or an id
                belongs to another slice.
            RuntimeError: the table has storage and no optimizer yet.
        """
        self._check_stored("accept_grad")
        flat = flat_ids("HashTable.accept_grad", ids)
        grad = float_rows("HashTable.accept_grad: grad", grad, self._group.device)
        if tuple(grad.shape) != (flat.shape[0], self.embedding_dim):
            raise ValueError(
                f"HashTable.accept_grad: grad has shape {tuple(grad.shape)}, expected "
                f"({flat.shape[0]}, {self.embedding_dim})"
            )
        if not self.trainable:
            raise ValueError(
                f"HashTable {self.name!r} is not trainable: it takes no gradients; make it "
                "with trainable=True"
            )
        group, table = self._group, self._table(child)
        check_in_slice("HashTable.accept_grad", self.slice, flat)
        gradients = grad.detach().to(flat.device, torch.float32)
        request = one_table(group.tables, table, flat, "HashTable.accept_grad")
        batch = LookupBatch.of_rows(*request, self.columns)
        if self.training:
            table_lookup.reserve_space(group.tables, batch)
            handles = group.find_or_insert(*request)
        else:
            handles = group.find(*request).handles
        handles = table_lookup.stage(group.tables, batch, handles)
        add_pending(group.tables, table, TableGradients(flat, handles, gradients))

    def grad(self, child: str | None = None) -> TableGradients:
        """Copy the pending gradients of a child's rows, one per id.

        Args:
            child: its name; required if there are several.

        Raises:
            ValueError: unknown child, or the table is not trainable.
        """
        if not self.trainable:
            raise ValueError(
                f"HashTable {self.name!r} is not trainable: it has no gradients; make it "
                "with trainable=True"
            )
        return read_pending(self._group.tables, self._table(child))

    def clear_grad(self) -> None:
        """Drop the pending gradients."""
        super()._forget_gradients()

    def _forget_gradients(self) -> None:
        """Do nothing: a model's ``zero_grad()`` may come in the middle of an accumulation."""

    # -- state -----------------------------------------------------------------------------------

    @property
    def _rank_entry(self) -> str:
        place = place_in_world(self.rank_group)
        if self.slice.whole and not place:
            return ""
        begin, end, size = self.slice
        return f"slots_{begin}_to_{end}_of_{size}{place}."


def _end_step(group: TableGroup, row_filter: RowFilter, now: int | None) -> None:
    group.step(now)
    if group.steps % row_filter.interval == 0:
        for table in range(len(group.names)):
            row_filter.remove(group, table)


__all__ = ["HashTable"]
