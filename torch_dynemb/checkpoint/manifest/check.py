"""Checks of a manifest, beyond its checksum, which a crafted file can match.

A load trusts what is checked here: numbers that become sizes and places, paths, and that the parts
of a table add up to the whole table.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch_dynemb.checkpoint.entries import DELTA, FULL, NO_GROUP
from torch_dynemb.checkpoint.manifest.records import (
    Manifest,
    SavedDense,
    SavedFile,
    SavedPart,
    SavedTable,
)
from torch_dynemb.checkpoint.manifest.whole_tables import check_whole
from torch_dynemb.ops.columns import MAX_COUNT, SKETCH_ROWS, TABLE_COLUMNS
from torch_dynemb.parts.table_parts import PACKED

_MOST_CRC = (1 << 32) - 1
_DTYPES = ("float32", "bfloat16", "float16", PACKED)
_STATE_DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8")
_SCORES = ("step", "timestamp", "frequency", "custom", "decayed", "expiry")


def check_manifest(manifest: Manifest) -> None:
    """Raise ValueError if an entry has a wrong type, or contradicts another one."""
    _text("uuid", manifest.uuid)
    if manifest.kind not in (FULL, DELTA):
        raise _wrong("kind", manifest.kind, f"{FULL!r} or {DELTA!r}")
    if manifest.parent is not None:
        _text("parent", manifest.parent)
    if (manifest.parent is not None) != (manifest.kind == DELTA):
        raise ValueError(
            f"kind is {manifest.kind!r}, but parent is {manifest.parent!r}: increments have one"
        )
    _number("ranks", manifest.ranks, least=1)
    for k, group in enumerate(manifest.groups):
        _number(f"groups[{k}].rank", group.rank)
        _texts(f"groups[{k}].tables", group.tables)
        _texts(f"groups[{k}].score_words", group.score_words, _SCORES)
        _check_file(f"groups[{k}].file", group.file)
        _numbers(f"groups[{k}].stored", group.stored)
    for name, table in manifest.tables.items():
        check_table(f"table {name!r}", table, len(manifest.groups))
        check_parts(name, table)
    for k, file in enumerate(manifest.changes):
        _check_file(f"changes[{k}]", file)
    batches = manifest.ranks if manifest.kind == DELTA else 0
    if len(manifest.changes) != batches or (batches and manifest.tables):
        raise ValueError(
            f"kind is {manifest.kind!r}, of {manifest.ranks} ranks, but it has "
            f"{len(manifest.changes)} batches of changes and {len(manifest.tables)} tables"
        )
    for kind, dense in (("dense", manifest.dense), ("state", manifest.state)):
        _check_dense(kind, dense)
    if not isinstance(manifest.dense.values, dict | None):
        raise _wrong("dense.values", manifest.dense.values, "a dict or null")


# -- kinds ---------------------------------------------------------------------------------------


def _wrong(where: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{where} is {str(value)[:100]!r}, expected {expected}")


def _number(where: str, value: object, *, least: int = 0, most: int = MAX_COUNT) -> None:
    if type(value) is not int or not least <= value <= most:
        raise _wrong(where, value, f"a whole number from {least} to {most}")


def _numbers(where: str, values: object, *, most: int = MAX_COUNT) -> None:
    if not isinstance(values, list):
        raise _wrong(where, values, "a list of numbers")
    for value in values:
        _number(where, value, most=most)


def _text(where: str, value: object) -> None:
    if not isinstance(value, str):
        raise _wrong(where, value, "a text")


def _texts(where: str, values: object, known: Collection[str] | None = None) -> None:
    if not isinstance(values, list):
        raise _wrong(where, values, "a list of texts")
    for value in values:
        _text(where, value)
        if known is not None and value not in known:
            raise _wrong(where, value, f"some of {list(known)}")


def _check_file(where: str, file: SavedFile) -> None:
    _text(f"{where}.path", file.path)
    names = file.path.split("/")
    if any(name in ("", ".", "..") for name in names) or not file.path.isprintable():
        raise _wrong(f"{where}.path", file.path, "a path within the checkpoint")
    _number(f"{where}.rows", file.rows)
    _number(f"{where}.bytes", file.bytes)
    _number(f"{where}.block_bytes", file.block_bytes, least=1, most=1 << 40)
    _numbers(f"{where}.crc32c", file.crc32c, most=_MOST_CRC)
    blocks = -(-file.bytes // file.block_bytes)
    if len(file.crc32c) != blocks:
        raise ValueError(
            f"{where} has {len(file.crc32c)} checksums for {blocks} blocks of {file.path}"
        )


# -- tables --------------------------------------------------------------------------------------


def check_table(where: str, table: SavedTable, groups: int | None) -> None:
    """Raise ValueError if an entry of a table has a wrong type.

    Args:
        where: prefix of the error.
        table: table of a manifest, or of a batch of changes.
        groups: number of groups; None: a table of a batch, without groups and files.
    """
    _number(f"{where}: embedding_dim", table.embedding_dim, least=1, most=1 << 31)
    if table.dtype not in _DTYPES:
        raise _wrong(f"{where}: dtype", table.dtype, f"one of {list(_DTYPES)}")
    _number(f"{where}: seed", table.seed, least=-(1 << 63), most=(1 << 63) - 1)
    if table.optimizer is not None:
        _check_optimizer(f"{where}: optimizer", table.optimizer)
    if table.padding_idx is not None:
        _number(f"{where}: padding_idx", table.padding_idx, least=-(1 << 63), most=(1 << 63) - 1)
    for name, value in (("hyper", table.hyper), ("policy", table.policy)):
        if not isinstance(value, dict):
            raise _wrong(f"{where}: {name}", value, "a dict")
    _texts(f"{where}: scores", table.scores, _SCORES)
    _number(f"{where}: step", table.step)
    _number(f"{where}: now", table.now)
    for k, part in enumerate(table.parts):
        _check_part(f"{where}, part {k}: ", part, table, groups)


def _check_optimizer(where: str, optimizer: Any) -> None:
    """Check name and state tensors, as ``OptimizerConfig.description`` returns them."""
    if not isinstance(optimizer, dict) or optimizer.keys() != {"name", "state"}:
        raise _wrong(where, optimizer, "its name and its state")
    _text(f"{where}.name", optimizer["name"])
    if not isinstance(optimizer["state"], list):
        raise _wrong(f"{where}.state", optimizer["state"], "a list")
    for entry in optimizer["state"]:
        kinds = [type(of) for of in entry] if isinstance(entry, list) else []
        if kinds != [str, bool, str] or entry[2] not in _STATE_DTYPES:
            raise _wrong(f"{where}.state", entry, "name, whether it is of rows, and dtype")


def _check_part(where: str, part: SavedPart, table: SavedTable, groups: int | None) -> None:
    _number(f"{where}rank", part.rank)
    _number(f"{where}first_column", part.first_column, most=table.embedding_dim - 1)
    most = table.embedding_dim - part.first_column
    _number(f"{where}columns", part.columns, least=1, most=most)
    _number(f"{where}slots", part.slots, least=1)
    _number(f"{where}slots_begin", part.slots_begin, most=part.slots - 1)
    _number(f"{where}slots_end", part.slots_end, least=part.slots_begin + 1, most=part.slots)
    _number(f"{where}ids", part.ids)
    _number(f"{where}ids_crc32c", part.ids_crc32c, most=_MOST_CRC)
    _number(f"{where}group", part.group, least=NO_GROUP, most=(groups or 0) - 1)
    _number(f"{where}number", part.number)
    _numbers(f"{where}counters", part.counters)
    if len(part.counters) != TABLE_COLUMNS:
        raise _wrong(f"{where}counters", part.counters, f"{TABLE_COLUMNS} numbers")
    _number(f"{where}optimizer_steps", part.optimizer_steps)
    _number(f"{where}counted", part.counted)
    _number(f"{where}removed_ids", part.removed_ids)
    _number(f"{where}sketch_width", part.sketch_width, most=1 << 40)
    if groups is None:
        if part.files:
            raise _wrong(f"{where}rows", part.files, "no files, because a batch has the rows")
        return
    for k, file in enumerate(part.rows):
        _check_file(f"{where}rows[{k}]", file)
    if not part.rows or sum(file.rows for file in part.rows) != part.ids:
        rows = [file.rows for file in part.rows]
        raise ValueError(f"{where}its files have {rows} rows for {part.ids} ids")
    for name, of_file, rows_of_file in (
        ("counts", part.counts, part.counted),
        ("sketch", part.sketch, SKETCH_ROWS if part.sketch_width > 0 else 0),
    ):
        if of_file is not None:
            _check_file(f"{where}{name}", of_file)
        if (0 if of_file is None else of_file.rows) != rows_of_file:
            raise ValueError(f"{where}its file of {name} does not have {rows_of_file} rows")


def check_parts(name: str, table: SavedTable) -> None:
    """Raise ValueError unless the parts are the whole table, and all its columns have the same ids.

    Args:
        name, table: name and content of the table.
    """
    if not table.parts:
        raise ValueError(f"table {name!r} has no parts")
    check_whole((part.rank, part.shard_of(name, table.embedding_dim)) for part in table.parts)
    first = {part.id_slots: part for part in table.first_parts}
    for part in table.parts:
        same = first.get(part.id_slots)
        if same is None or (part.ids, part.ids_crc32c) != (same.ids, same.ids_crc32c):
            raise ValueError(
                f"table {name!r} has other ids in columns from {part.first_column} on than in the "
                "first columns"
            )


# -- dense state and state= ----------------------------------------------------------------------


def _check_dense(kind: str, dense: SavedDense) -> None:
    for k, file in enumerate(dense.files):
        _check_file(f"{kind}.files[{k}]", file)
    for name, entries in dense.entries.items():
        where = f"{kind}: entry {name!r}"
        if not entries:
            raise ValueError(f"{where} has no pieces")
        for entry in entries:
            _number(f"{where}: file", entry.file, most=len(dense.files) - 1)
            _text(f"{where}: tensor", entry.tensor)
            _numbers(f"{where}: offsets", entry.offsets)
            _numbers(f"{where}: sizes", entry.sizes)
            _check_place(where, entry.offsets, entry.sizes)


def _check_place(where: str, offsets: list[int], sizes: list[int]) -> None:
    beyond = any(offset > size for offset, size in zip(offsets, sizes, strict=False))
    if len(offsets) != len(sizes) or beyond:
        raise ValueError(f"{where} has a piece at {offsets} of a tensor of sizes {sizes}")


__all__ = ["check_manifest", "check_parts", "check_table"]
