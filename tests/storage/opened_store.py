"""A store that Python drives without a cache, and what it should hold."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import GENERATION_BITS, SLOT_COLUMNS, TIER_COLUMNS, StoreStat
from torch_dynemb.ops.tensors import RowTensors, TierTensors

HEADER = 24  # bytes of a record before the row
PAGE = 4096
SEGMENT = 1 << 16
SLOTS = 8  # the cache is not used
MAX_ROWS = 1 << 20


def handle(row: int, generation: int = 1) -> int:
    return row << GENERATION_BITS | generation


def row_tensors(dims: Sequence[int]) -> RowTensors:
    """Empty caches: rows of float32, and a number for each row as optimizer state."""
    nothing = torch.zeros(0)
    return RowTensors(
        weights=[torch.zeros(SLOTS, dim) for dim in dims],
        generations=[torch.zeros(SLOTS, dtype=torch.int32) for _ in dims],
        state=[torch.zeros(SLOTS) for _ in dims],
        dirty_bits=[],
        copy_on_write=[],
        row_clock=nothing,
        hyper=nothing,
        meta=nothing,
        init_data=nothing,
        pending=[],
    )


def tier_tensors(dims: Sequence[int]) -> TierTensors:
    return TierTensors(
        places=[ops.reserve([MAX_ROWS], torch.int32) for _ in dims],
        slots=[torch.zeros(SLOTS, SLOT_COLUMNS, dtype=torch.int64) for _ in dims],
        free_slots=[torch.zeros(SLOTS, dtype=torch.int32) for _ in dims],
        clock=torch.zeros(1 + len(dims), TIER_COLUMNS, dtype=torch.int64),
    )


@dataclass
class OpenedStore:
    """A store, and beside it what was written.

    Attributes:
        written: of each slab, by handle the id and the bytes of the row.
    """

    tiers: TierTensors
    rows: RowTensors
    path: Path
    written: list[dict[int, tuple[int, bytes]]] = field(default_factory=list)

    @property
    def clock(self) -> Tensor:
        return self.tiers.clock

    def record_bytes(self, slab: int) -> int:
        row = 4 * self.rows.weights[slab].shape[1] + 4
        return (HEADER + row + 7) // 8 * 8

    def write(self, slab: int, rows: Sequence[int], generation: int = 1, seed: int = 0) -> None:
        """Writes drawn bytes for distinct rows; the id of row r is r * 7 - 3."""
        width = self.record_bytes(slab)
        draw = random.Random(f"{seed} {slab} {rows[0] if rows else 0} {generation}")
        records = torch.zeros(len(rows), width, dtype=torch.uint8)
        row_bytes = 4 * self.rows.weights[slab].shape[1] + 4
        data = bytearray(draw.randbytes(len(rows) * row_bytes))
        if rows:
            records[:, HEADER : HEADER + row_bytes] = torch.frombuffer(
                data, dtype=torch.uint8
            ).reshape(len(rows), row_bytes)
        handles = torch.tensor([handle(row, generation) for row in rows], dtype=torch.int64)
        ids = torch.tensor([row * 7 - 3 for row in rows], dtype=torch.int64)
        ops.store_write(self.clock, slab, handles, ids, slab + 5, records)
        for i, row in enumerate(rows):
            self.written[slab].pop(handle(row, generation - 1), None)
            begin = i * row_bytes
            self.written[slab][handle(row, generation)] = (
                row * 7 - 3,
                bytes(data[begin : begin + row_bytes]),
            )

    def read(self, slab: int, handles: Sequence[int]) -> ops.StoredRecords:
        ids = [(h >> GENERATION_BITS) * 7 - 3 for h in handles]
        return ops.store_read(self.clock, slab, torch.tensor(handles), torch.tensor(ids))

    def check_content(self) -> None:
        """All that was written is there, bit by bit."""
        for slab, rows in enumerate(self.written):
            if not rows:
                continue
            records, found = self.read(slab, list(rows))
            assert found.all()
            stored = [bytes(record) for record in records.numpy()]
            for (row_id, data), record in zip(rows.values(), stored, strict=True):
                assert record[HEADER : HEADER + len(data)] == data
                assert int.from_bytes(record[16:24], "little", signed=True) == row_id

    def copy_of_content(self) -> list[dict[int, tuple[int, bytes]]]:
        return [dict(rows) for rows in self.written]

    def erase(self, slab: int, handles: Sequence[int]) -> None:
        ops.store_erase(self.clock, slab, torch.tensor(handles))
        for erased in handles:
            del self.written[slab][erased]

    def stat(self, column: StoreStat) -> int:
        return int(ops.store_stats(self.clock)[column])

    def files(self, slab: int = 0) -> list[Path]:
        ops.store_drain(self.clock)  # after a job the thread makes and renames files
        return sorted((self.path / "rows" / f"slab{slab}").iterdir())

    def close(self) -> None:
        ops.store_close(self.clock)


def open_store(
    path: Path,
    dims: Sequence[int] = (121,),
    *,
    segment: int = SEGMENT,
    disk: int = 0,
    io: ops.IoPath = ops.IoPath.AUTO,
    tiered: Sequence[int] | None = None,
) -> OpenedStore:
    store = OpenedStore(tier_tensors(dims), row_tensors(dims), path, [{} for _ in dims])
    ops.store_open(
        store.tiers,
        store.rows,
        path=path,
        slab_names=[f"slab{slab}" for slab in range(len(dims))],
        tiered=[1] * len(dims) if tiered is None else tiered,
        segment_bytes=segment,
        disk_bytes=disk,
        io=io,
    )
    return store


@contextmanager
def opened(path: Path, dims: Sequence[int] = (121,), **options: object) -> Iterator[OpenedStore]:
    """A store that is closed in the end."""
    store = open_store(path, dims, **options)  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store.close()
