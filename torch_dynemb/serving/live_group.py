"""Tables read by any number of threads while one thread updates their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb._library.error_names import name_tables
from torch_dynemb.argument_checks import described, integer, table_number, text
from torch_dynemb.errors import HostMemoryError
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    BUCKET_WORDS,
    LIVE_SLAB_COLUMNS,
    LIVE_TABLE_COLUMNS,
    MAX_ROWS,
    LiveTable,
    Meta,
    buckets_for,
)
from torch_dynemb.ops.quantized import row_bytes
from torch_dynemb.ops.serving import LIVE_FORMATS
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.serving.frozen_tables import FrozenTables
from torch_dynemb.serving.live_state import QUANTIZED, ROW_DTYPES, MemoryState
from torch_dynemb.serving.updated_tables import UpdatedTables

_IDS_AT_ONCE = 1 << 16  # copied in one batch
_ROW_ALIGNMENT = 16  # bytes
_FLOAT_BYTES = {LIVE_FORMATS["fp32"]: 4, LIVE_FORMATS["bf16"]: 2, LIVE_FORMATS["fp16"]: 2}


class LiveTables(UpdatedTables):
    """Ids and rows of a group, read by threads without locks while another thread updates them.

    A lookup during an update returns each row from before or from after it, never a part of both.
    Rows of one batch may be of both. A lookup that begins after an update has ended returns its
    rows. Readers never wait. One thread at a time may update; a second one is refused.

    The tensors never move. Programs of ``torch.export`` and packages of AOTInductor that use them
    as constants therefore read the updates, too. They are on the CPU, are not part of
    ``state_dict()``, and keep their dtypes in ``half()`` and the like.

    Args:
        source: the tables to copy. Rows of a narrower format are rounded.
        headroom: how many more ids each table may have: a number for all, or by name.
        rows: format of rows, a key of ``torch_dynemb.ops.LIVE_FORMATS``; None: as in ``source``.
            Rows of 8 bits and less have the bytes of frozen tables.
        dense_version: version of the dense state for :meth:`version`.

    Raises:
        TypeError, ValueError: headroom, rows or dense_version.
        HostMemoryError: the tables do not fit in memory.
        RuntimeError: the tables are not on the CPU.
    """

    def __init__(
        self,
        source: FrozenTables,
        *,
        headroom: int | Mapping[str, int],
        rows: str | None = None,
        dense_version: str = "",
    ) -> None:
        super().__init__()
        self.names = list(source.names)
        self.place, self.depth = source.place, source.depth
        self.dense_version = text("LiveTables: dense_version", dense_version)
        self.formats = [LIVE_FORMATS[name] for name in _formats(source, rows)]
        extra = checked_headroom(self.names, headroom)
        sizes = list(source.sizes().values())
        meta = source.get_buffer("meta").clone()
        if meta.device.type != "cpu":
            raise RuntimeError(
                f"LiveTables: the tables are on {meta.device}, but live tables are on the CPU: "
                "make them of a copy that is there"
            )
        capacity = [size + more for size, more in zip(sizes, extra, strict=True)]
        self._reserve(source, meta, capacity)
        for table in range(len(self.names)):
            self._copy(source, table)

    def _reserve(self, source: FrozenTables, meta: Tensor, capacity: list[int]) -> None:
        ranges = [buckets_for(ids) for ids in capacity]
        meta[:, Meta.REGION_BUCKETS] = torch.tensor(ranges, device="cpu")
        both = 2 * meta[:, Meta.REGION_BUCKETS]
        meta[:, Meta.REGION_BEGIN] = both.cumsum(0) - both
        slab_of, dims = meta[:, Meta.SLAB].tolist(), meta[:, Meta.DIM].tolist()
        self.dims: list[int] = dims
        self._slots = [BUCKET_WIDTH * buckets for buckets in ranges]
        # one row more than ids: an update writes a new row before it frees the old one
        counts = [1] * len(self.formats)
        words = [0] * len(self.formats)
        for slab, dim, ids in zip(slab_of, dims, capacity, strict=True):
            counts[slab] += ids
            words[slab] = _row_words(self.formats[slab], dim)
        needed = 8 * (int(both.sum()) * BUCKET_WORDS)
        needed += 8 * sum(count * width for count, width in zip(counts, words, strict=True))
        if needed > (free := ops.available_memory()):
            raise HostMemoryError(
                f"LiveTables: tables of {sum(capacity)} ids take {needed} bytes, but {free} bytes "
                "of memory are free: give them less headroom, or rows of a narrower format",
                tables=self.names,
            )
        tables = torch.zeros(len(capacity), LIVE_TABLE_COLUMNS, dtype=torch.int64, device="cpu")
        tables[:, LiveTable.CAPACITY] = torch.tensor(capacity, device="cpu")
        buffers = {
            "buckets": ops.reserve([int(both.sum()), BUCKET_WORDS], torch.int64, huge_pages=True),
            "tables": tables,
            "meta": meta,
            "free": torch.zeros(len(counts), LIVE_SLAB_COLUMNS, dtype=torch.int64, device="cpu"),
            "init_data": source.get_buffer("init_data").clone(),
        }
        for slab, (count, width) in enumerate(zip(counts, words, strict=True)):
            buffers[f"rows{slab}"] = ops.reserve([count, width], torch.int64, huge_pages=True)
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor, persistent=False)
        self._no_offsets = meta.new_empty(0)

    def _copy(self, source: FrozenTables, table: int) -> None:
        dim = int(self.tensors().meta[table, Meta.DIM])
        for ids in source.ids(table).split(_IDS_AT_ONCE):
            values = source.lookup(LookupBatch.of_rows(ids, ids[:0], [table], dim))
            self.state().apply(table, ids, values, ids[:0])
        # copying does not count as an update
        self.tensors().tables[table, LiveTable.INSERTED :] = 0

    def tensors(self) -> ops.ServedTensors:
        """Return the tensors of the tables, as ops take them."""
        buffers: Any = self._buffers  # get_buffer() would take as long as a small lookup
        return ops.ServedTensors(
            buffers["buckets"],
            buffers["tables"],
            buffers["meta"],
            [buffers[f"rows{slab}"] for slab in range(len(self.formats))],
            [],
            buffers["init_data"],
            self.formats,
            buffers["free"],
        )

    def list_ids(self, table: int | str) -> ops.LiveIds:
        """Return all ids of a table, in the slots of its index.

        Args:
            table: name or number of the table.

        Raises:
            TypeError, ValueError, IndexError: an unknown table.
            RuntimeError: the tables are damaged.
        """
        number = table_number("LiveTables.list_ids", self.names, table)
        return ops.serve_ids(self.tensors(), table=number, slots=self._slots[number])

    def read_ids(self, table: int | str, ids: Tensor, wanted: Tensor | None = None) -> ops.LiveRows:
        """Return the rows of those ids that the table has now.

        Args:
            table: name or number of the table.
            ids: int64 [n].
            wanted: bool [n], ids to look for; None: all.

        Raises:
            TypeError, ValueError, IndexError: an unknown table.
            RuntimeError: the tables are damaged.
        """
        number = table_number("LiveTables.read_ids", self.names, table)
        dim = self.dims[number]
        try:
            return ops.serve_rows(self.tensors(), ids, wanted, table=number, dim=dim)
        except RuntimeError as error:
            name_tables(error, self.names)
            raise

    def state(self) -> MemoryState:
        return MemoryState(self.names, self.tensors())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LiveTables:
        """Leave the tables as they are: readers and the writer have their addresses."""
        probe = fn(torch.zeros(1, device="cpu"))
        if probe.device.type != "cpu" or probe.is_shared():
            where = "shared memory" if probe.is_shared() else str(probe.device)
            raise RuntimeError(
                f"LiveTables: live tables cannot go to {where}: they stay where they are, in the "
                "memory of this process. Serve a frozen model there (torch_dynemb.freeze)"
            )
        return self


def checked_headroom(names: list[str], headroom: int | Mapping[str, int]) -> list[int]:
    """Return the headroom of each table, checked.

    Args:
        names: of the tables.
        headroom: a number for all, or by name.
    """
    owner = "LiveTables: headroom"
    if isinstance(headroom, Mapping):
        if set(headroom) != set(names):
            raise ValueError(
                f"{owner} has tables {sorted(headroom)}, expected a number for each of {names}"
            )
        return [
            integer(f"{owner}[{name!r}]", headroom[name], least=0, most=MAX_ROWS) for name in names
        ]
    return [integer(owner, headroom, least=0, most=MAX_ROWS)] * len(names)


def _formats(source: FrozenTables, rows: str | None) -> list[str]:
    """Return the name of the format of each slab."""
    if rows is None:
        dtypes = [source.get_buffer(f"weights{s}").dtype for s in range(source.slabs)]
        if not set(dtypes) <= set(ROW_DTYPES):
            raise ValueError(
                f"LiveTables: rows is None, but the rows of the tables are of {dtypes}, which "
                f"live rows cannot have: choose one of {list(LIVE_FORMATS)}"
            )
        return [ROW_DTYPES[dtype] for dtype in dtypes]
    if rows not in LIVE_FORMATS:
        raise ValueError(
            f"LiveTables: rows is {described(rows)}, expected one of {list(LIVE_FORMATS)} or None"
        )
    odd = [
        name
        for name, dim in zip(
            source.names, source.get_buffer("meta")[:, Meta.DIM].tolist(), strict=True
        )
        if dim % 2 != 0
    ]
    if rows == "int4" and odd:
        raise ValueError(
            f"LiveTables: rows is 'int4', but tables {odd} have an odd number of columns, which "
            "rows of int4 cannot have: take 'int8'"
        )
    return [rows] * source.slabs


def _row_words(code: int, dim: int) -> int:
    size = _FLOAT_BYTES[code] * dim if code in _FLOAT_BYTES else row_bytes(QUANTIZED[code], dim)
    return 2 * -(-size // _ROW_ALIGNMENT)


__all__ = ["LiveTables", "checked_headroom"]
