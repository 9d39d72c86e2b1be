"""Ids and rows of a group as read-only buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import table_number
from torch_dynemb.errors import HostMemoryError
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    GENERATION_BITS,
    GENERATION_MASK,
    Meta,
    Pooling,
    RowFormat,
    Table,
)
from torch_dynemb.ops.row_copies import copied_rows
from torch_dynemb.serving.frozen_state import check_frozen
from torch_dynemb.serving.missing import CountedTables
from torch_dynemb.serving.row_files import CopiedIndex, lost_rows
from torch_dynemb.serving.row_formats import FormattedRows, RowKind, is_stored_so, stored_rows
from torch_dynemb.serving.row_split import split_by_kind
from torch_dynemb.table.expiry import Expiry
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.row_access import handle_rows, read_rows
from torch_dynemb.table.tables import exported
from torch_dynemb.table.undisturbed import Undisturbed

_ROWS_AT_ONCE = 1 << 14  # read from a store


class TablePlace(NamedTuple):
    """Place of a table in frozen buffers.

    Attributes:
        begin, end: its rows of ``buckets``.
        dim: columns of a row.
    """

    begin: int
    end: int
    dim: int


class FrozenTables(CountedTables):
    """A group's ids and rows as buffers of their used size, without optimizer state.

    Args:
        group: the tables to copy; its rows are materialised first.
        kept_because: reason if rows cannot be stored in another format.

    Raises:
        HostMemoryError: rows lie in a store, and the copy does not fit in memory.
        InUseError: another thread trains or changes the tables.
    """

    _formats: tuple[int, ...]  # of slabs
    _places: list[TablePlace] | None = None  # of tables

    def __init__(self, group: TableGroup, kept_because: str | None = None) -> None:
        super().__init__()
        self._kept_because = kept_because
        _check_room(group)
        group.materialize()
        with Undisturbed("freeze", [group]):
            self._copy(group)

    def _copy(self, group: TableGroup) -> None:
        self.names = group.names
        buckets, tables, meta = copied_index(group)
        self.register_buffer("buckets", buckets)
        self.register_buffer("tables", tables)
        self.register_buffer("meta", meta)
        self.register_buffer("init_data", group.rows.init_data.clone())
        self._no_offsets = meta.new_empty(0)
        self.slabs = len(group.config.slabs)
        self.place_of(0)
        self._formats = (int(RowFormat.FLOATS),) * self.slabs
        for s in range(self.slabs):
            weights, generations = _copied_rows(group, s)
            self.register_buffer(f"weights{s}", weights)
            self.register_buffer(f"generations{s}", generations)

    def store_rows(self, rows: RowKind | Mapping[str, RowKind | None]) -> None:
        """Store the rows in another format, slab by slab; nothing changes after an error.

        Args:
            rows: as in :func:`torch_dynemb.freeze`, for all tables or by table name; None: as they
                are. Rows that have this format already stay. Tables that shared a slab get slabs of
                their own if their formats differ.

        Raises:
            KeyError: ``rows`` lacks a table.
            ValueError: a table has rows without finite values in the format, or a dim that the
                format lacks. Or the rows are quantized already in another format, or their module
                fixes it (``kept_because``).
        """
        kinds = [rows if isinstance(rows, str) else rows[name] for name in self.names]
        if not any(kinds):
            return
        asked = rows if isinstance(rows, str) else dict(rows)
        if self._kept_because is not None:
            raise ValueError(f"freeze: rows is {asked!r}, but {self._kept_because}")
        if any(self._formats):
            if all(self._stored_so(table, kind) for table, kind in enumerate(kinds)):
                return
            raise ValueError(f"freeze: rows is {asked!r}, but the rows are quantized already")
        buffers, of_slabs = split_by_kind(dict(self.named_buffers(recurse=False)), kinds)
        formats = []
        for slab, kind in enumerate(of_slabs):
            row_format = RowFormat.FLOATS
            if kind is not None:
                stored = self._stored(buffers, slab, kind)
                buffers[f"weights{slab}"], row_format = stored.weights, stored.row_format
            formats.append(int(row_format))
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.slabs = len(of_slabs)
        self._formats = tuple(formats)

    def _stored_so(self, table: int, rows: RowKind | None) -> bool:
        slab = int(self.get_buffer("meta")[table, Meta.SLAB])
        return is_stored_so(self.get_buffer(f"weights{slab}"), self._formats[slab], rows)

    def _stored(self, buffers: Mapping[str, Tensor], slab: int, rows: RowKind) -> FormattedRows:
        """Return the rows of a slab in another format; raise unless it can hold them."""
        tables = (buffers["meta"][:, Meta.SLAB] == slab).nonzero().flatten().tolist()
        names = [self.names[t] for t in tables]
        try:
            stored = stored_rows(buffers[f"weights{slab}"], rows)
        except ValueError as error:
            raise ValueError(f"freeze: rows is {rows!r}, tables {names}: {error}") from None
        for table in tables:
            self._check_kept(buffers["buckets"], table, rows, stored.lost)
        return stored

    def _check_kept(self, buckets: Tensor, table: int, rows: str, lost: Tensor) -> None:
        """Raise ValueError if a row with an owner is lost."""
        begin = int(self.get_buffer("meta")[table, Meta.REGION_BEGIN])
        count = int(self.get_buffer("tables")[table, Table.BUCKET_COUNT])
        stored = buckets[begin : begin + count, BUCKET_WIDTH:]
        numbers = (stored[stored > 0] - 1) >> GENERATION_BITS
        bad = int(lost[numbers].sum())
        if bad > 0:
            example = int(self.ids(table)[lost[numbers]][0])
            raise lost_rows(rows, self.names[table], bad, example)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenTables:
        """Move the tables as ``fn`` moves tensors; they keep their dtypes."""

        def kept(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return fn(tensor)
            probe = fn(tensor.new_zeros(1))
            return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

        super()._apply(kept, recurse)  # type: ignore[no-untyped-call]
        self._no_offsets = self.get_buffer("meta").new_empty(0)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = dict(self.named_buffers())
        # writers that take two empty tensors for shared ones drop them
        empty = {prefix + name: buffer for name, buffer in own.items() if buffer.numel() == 0}
        state_dict = {**empty, **state_dict}
        absent = [prefix + name for name in own if prefix + name not in state_dict]
        if absent:  # the others would not fit those here
            missing_keys += absent
            return
        try:
            given = {name: state_dict[prefix + name] for name in own}
            check_frozen(own, given, self._formats)
        except ValueError as error:
            error_msgs.append(f"{prefix.rstrip('.')}: {error}")
            return
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        self._places = None
        self.place_of(0)

    def tensors(self) -> ops.ServedTensors:
        """Return the tensors of the tables, as ops take them."""
        buffers: Any = self._buffers  # get_buffer() would take as long as a small lookup
        slabs = range(self.slabs)
        return ops.ServedTensors(
            buffers["buckets"],
            buffers["tables"],
            buffers["meta"],
            [buffers[f"weights{s}"] for s in slabs],
            [buffers[f"generations{s}"] for s in slabs],
            buffers["init_data"],
            self._formats,
        )

    def place_of(self, table: int) -> TablePlace:
        """Return the place of a table in the buffers; a number to programs that are exported.

        Args:
            table: number of the table.
        """
        if self._places is None:
            columns = [Meta.REGION_BEGIN, Meta.REGION_BUCKETS, Meta.DIM]
            numbers = self.get_buffer("meta")[:, columns].tolist()
            self._places = [TablePlace(begin, begin + n, dim) for begin, n, dim in numbers]
        return self._places[table]

    def read_handles(self, table: int, ids: Tensor, handles: Tensor) -> Tensor:
        """Read rows by handle; nothing changes.

        Args:
            table: number of the table.
            ids: int64 [n].
            handles: int64 [n], of the ids; -2 reads zeros.

        Returns:
            float32 [n, dim].
        """
        served = self.tensors()
        output: Tensor = torch.ops.dynemb.embedding_inference(
            served.weights,
            served.generations,
            served.meta,
            served.init_data,
            ids,
            handles,
            self.one_bag,
            None,
            [table],
            [self.place_of(table).dim],
            int(Pooling.NONE),
            list(served.formats),
        )
        return output

    def ids(self, table: int | str) -> Tensor:
        """Return the ids of a table, int64 [n], in the order of the index.

        Args:
            table: name or number of the table.

        Raises:
            TypeError, ValueError, IndexError: an unknown table.
        """
        number = table_number("FrozenTables.ids", self.names, table)
        begin = int(self.get_buffer("meta")[number, Meta.REGION_BEGIN])
        count = int(self.get_buffer("tables")[number, Table.BUCKET_COUNT])
        lines = self.get_buffer("buckets")[begin : begin + count]
        return lines[:, :BUCKET_WIDTH][lines[:, BUCKET_WIDTH:] > 0]

    def sizes(self) -> dict[str, int]:
        """Return the number of ids by table name."""
        return dict(zip(self.names, self.get_buffer("tables")[:, Table.SIZE].tolist(), strict=True))


def copied_index(group: TableGroup) -> CopiedIndex:
    """Copy the index of a group, without expired ids."""
    count = len(group.config.tables)
    meta, tables = group.index.meta[:count].clone(), group.index.tables[:count].clone()
    active = [group.index.active_buckets(t) for t in range(count)]
    meta[:, Meta.REGION_BUCKETS] = tables[:, Table.BUCKET_COUNT]
    meta[:, Meta.TIERED] = 0  # lookups need no cache of slots
    meta[:, Meta.REGION_BEGIN] = (
        meta[:, Meta.REGION_BUCKETS].cumsum(0) - (meta[:, Meta.REGION_BUCKETS])
    )
    buckets = torch.cat([group.index.buckets[part] for part in active])
    _forget_expired(group, buckets, tables, meta)
    return CopiedIndex(buckets, tables, meta)


def _check_room(group: TableGroup) -> None:
    """Raise HostMemoryError if rows of a store do not fit in memory."""
    slabs = group.config.slabs
    stored = [s for s in range(len(slabs)) if group.tables.stored(s) is not None]
    needed = sum(
        group.index.used_rows(s) * (slabs[s].dim * slabs[s].dtype.itemsize + 4) for s in stored
    )
    free = ops.available_memory() if needed > 0 else 0
    if needed > free:
        raise HostMemoryError(
            f"freeze: a copy of the rows {[slabs[s].name for s in stored]}, which lie in a store, "
            f"takes {needed} bytes, but {free} bytes of memory are free: freeze on a machine with "
            "more memory, or look rows up in the model itself, in eval mode",
            tables=group.names,
        )


def _copied_rows(group: TableGroup, slab: int) -> tuple[Tensor, Tensor]:
    """Copy weights and generations of the rows of a slab, from memory or from a store."""
    # at least one row, so that an empty table has a shape that kernels accept
    used = max(1, group.index.used_rows(slab))
    tables = group.tables
    if tables.stored(slab) is None:
        return (
            copied_rows(group.rows.weights[slab][:used]),
            group.rows.generations[slab][:used].clone(),
        )
    weights = group.rows.weights[slab].new_zeros(used, group.config.slabs[slab].dim)
    generations = group.rows.generations[slab].new_zeros(used)
    for table in range(len(group.config.tables)):
        if group.config.slab_of(table) != slab:
            continue
        for batch in exported(tables, table, _ROWS_AT_ONCE):
            numbers = handle_rows(batch.handles)
            weights[numbers] = read_rows(tables, table, batch.ids, batch.handles, state=False).rows
            generations[numbers] = (batch.handles & GENERATION_MASK).to(torch.int32)
    return weights, generations


def _forget_expired(group: TableGroup, buckets: Tensor, tables: Tensor, meta: Tensor) -> None:
    """Remove expired ids from a copy of the index."""
    if "expiry" not in group.config.layout.score_words:
        return
    for table in range(tables.shape[0]):
        expiry = Expiry(group.tables, table)
        for batch in exported(group.tables, table, 1 << 20):
            ids = batch.ids[expiry.expired(batch)]
            index = ops.IndexTensors.read_only(buckets, tables, meta)._replace(
                scores=buckets.new_empty(0, BUCKET_WIDTH),
                slabs=torch.zeros_like(group.index.slabs),
                free_rows=buckets.new_empty(
                    group.index.slabs.shape[0], int(tables[:, Table.SIZE].sum())
                ),
            )
            ops.erase_(index, ids, ids.new_empty(0), [table])


__all__ = ["FrozenTables", "copied_index"]
