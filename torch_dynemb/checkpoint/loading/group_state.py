"""The state of a saved group apart from its ids and rows, as its own file has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torch_dynemb.checkpoint.entries import (
    GROUP_CLOCK,
    GROUP_ROW_CLOCK,
    GROUP_SEEDS,
    GROUP_SKETCH,
    GROUP_SLABS,
    GROUP_TABLES,
    free_rows_entry,
    tombstones_entry,
)
from torch_dynemb.checkpoint.files.summed_files import SummedReader
from torch_dynemb.checkpoint.manifest.records import SavedFile
from torch_dynemb.errors import DamagedFileError, NoRoomError
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    CLOCK_HEAD,
    GENERATION_BITS,
    MAX_LOAD_PERCENT,
    MIN_BUCKETS,
    Meta,
    Slab,
    Table,
)
from torch_dynemb.table.state_check import check_columns, check_counts, check_slab
from torch_dynemb.table.tables import Tables

_GENERATION_MASK = (1 << GENERATION_BITS) - 1


def read_group_state(
    folder: Path, file: SavedFile, tables: Tables, sizes: Sequence[int]
) -> dict[str, Tensor]:
    """The tensors of a group's file, on the CPU.

    Args:
        folder: of the checkpoint.
        file: of the group.
        tables: that take the state: the same ones as were saved.
        sizes: ids by table, then by table of counted ids, as the manifest says.

    Raises:
        DamagedFileError: the file is damaged, or says what cannot be.
    """
    path = folder / file.path
    reader = SummedReader(path, file.sums)
    try:
        found = {}
        for name, (shape, dtype) in _expected(tables).items():
            section = reader.tensors.get(name)
            if section is None:
                raise DamagedFileError(f"{path}: the file lacks {name!r}", path=path)
            fits = len(section.shape) == len(shape) and all(
                own in (-1, size) for own, size in zip(shape, section.shape, strict=True)
            )
            if not fits or section.dtype != dtype:
                raise DamagedFileError(
                    f"{path}: {name!r} is {section.dtype} {section.shape}, expected {dtype} "
                    f"{shape}",
                    path=path,
                )
            found[name] = torch.empty(section.shape, dtype=section.dtype)
            reader.read(name, 0, found[name])
        reader.finish()
    finally:
        reader.close()
    try:
        _check(found, tables, sizes)
    except ValueError as error:
        raise DamagedFileError(f"{path}: {error}", path=path) from error
    return found


def _expected(tables: Tables) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes, -1 for any size, and dtypes."""
    index, rows = tables.index, tables.rows
    own = {
        GROUP_TABLES: index.tables,
        GROUP_SLABS: index.slabs,
        GROUP_CLOCK: index.clock,
        GROUP_ROW_CLOCK: rows.row_clock,
        GROUP_SKETCH: index.sketch,
        GROUP_SEEDS: index.meta[:, Meta.SEED],
    }
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()
    }
    for s in range(len(tables.config.slabs)):
        expected[free_rows_entry(s)] = (-1,), torch.int64
    for t in range(index.tables.shape[0]):
        expected[tombstones_entry(t)] = (-1, 2), torch.int64
    return expected


def _check(state: Mapping[str, Tensor], tables: Tables, sizes: Sequence[int]) -> None:
    """Raises ValueError for numbers that cannot be, or that no memory is there for."""
    config = tables.config
    counters = [f"counts of {config.names[t]}" for t in config.layout.counter_tables]
    names = [*config.names, *counters]
    check_columns(GROUP_TABLES, state[GROUP_TABLES], Table, names)
    check_columns(GROUP_SLABS, state[GROUP_SLABS], Slab, [slab.name for slab in config.slabs])
    # behind the head of the clock are custom scores: any number
    check_counts(GROUP_CLOCK, state[GROUP_CLOCK][:CLOCK_HEAD])
    check_counts(GROUP_ROW_CLOCK, state[GROUP_ROW_CLOCK])
    check_counts(GROUP_SKETCH, state[GROUP_SKETCH])
    for t, (name, ids) in enumerate(zip(names, sizes, strict=True)):
        row = state[GROUP_TABLES][t].tolist()
        region = int(tables.index.meta[t, Meta.REGION_BUCKETS])
        buckets, left = row[Table.BUCKET_COUNT], state[tombstones_entry(t)]
        slots = buckets * BUCKET_WIDTH
        if not MIN_BUCKETS <= buckets <= region:
            raise ValueError(
                f"table {name!r} has {buckets} buckets, expected {MIN_BUCKETS} to {region}"
            )
        if row[Table.SIZE] != ids or ids > slots * MAX_LOAD_PERCENT // 100:
            raise ValueError(
                f"table {name!r} has {row[Table.SIZE]} ids in {slots} slots, expected {ids}, and "
                f"at most {MAX_LOAD_PERCENT} %"
            )
        if row[Table.TOMBSTONES] != left.shape[0]:
            raise ValueError(
                f"table {name!r} has {left.shape[0]} tombstones, expected {row[Table.TOMBSTONES]}"
            )
        if left.shape[0] > 0 and not 0 <= int(left[:, 0].min()) <= int(left[:, 0].max()) < slots:
            raise ValueError(f"table {name!r} has tombstones beyond its {slots} slots")
    for s, slab in enumerate(config.slabs):
        row = state[GROUP_SLABS][s].tolist()
        check_slab(tables, s, row)
        own = [ids for t, ids in enumerate(sizes[: len(config.tables)]) if config.slab_of(t) == s]
        free, reserved = state[free_rows_entry(s)], tables.rows.weights[s].shape[0]
        if (row[Slab.FREE_COUNT], row[Slab.NEXT_ROW]) != (free.shape[0], free.shape[0] + sum(own)):
            raise ValueError(
                f"slab {slab.name!r} has {row[Slab.NEXT_ROW]} rows, {row[Slab.FREE_COUNT]} of them "
                f"free, expected {sum(own)} of ids and {free.shape[0]} free ones"
            )
        if row[Slab.NEXT_ROW] > reserved:
            raise NoRoomError(
                f"checkpoint.load: slab {slab.name!r} has {row[Slab.NEXT_ROW]} rows, but the model "
                f"reserves {reserved}: construct it with a larger max_rows, capacity or budget",
                tables=config.names,
            )
        check_handles(f"free rows of slab {slab.name!r}", free, row[Slab.NEXT_ROW])


def check_handles(what: str, handles: Tensor, rows: int) -> None:
    """Raises ValueError unless handles are of rows below a number, each written by somebody.

    Args:
        what: they are of.
        handles: int64 [n], of the CPU.
        rows: how many there are.
    """
    if handles.numel() == 0:
        return
    least, most = int(handles.min()), int(handles.max())
    if least < 0 or most >> GENERATION_BITS >= rows:
        wrong = least if least < 0 else most
        raise ValueError(
            f"{what} have handle {wrong}, of row {wrong >> GENERATION_BITS}, expected 0 to "
            f"{rows - 1}"
        )
    if bool(((handles & _GENERATION_MASK) == 0).any()):
        raise ValueError(f"{what} have a handle of generation 0, expected 1 or more")


__all__ = ["check_handles", "read_group_state"]
