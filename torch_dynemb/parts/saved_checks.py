"""Checks of the description of a table, beyond its checksum, which a crafted file can match.

A load trusts what is checked here: numbers that become sizes and places, paths, and that the parts
of a table add up to the whole table.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch_dynemb.ops.columns import MAX_COUNT, SKETCH_ROWS, TABLE_COLUMNS
from torch_dynemb.parts.saved_tables import NO_GROUP, SavedFile, SavedPart, SavedTable
from torch_dynemb.parts.table_parts import PACKED
from torch_dynemb.parts.whole_tables import check_whole

_MOST_CRC = (1 << 32) - 1
_DTYPES = ("float32", "bfloat16", "float16", PACKED)
_STATE_DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8")
SCORES = ("step", "timestamp", "frequency", "custom", "decayed", "expiry")


def wrong_entry(where: str, value: object, expected: str) -> ValueError:
    """Return the error of a wrong entry: where it is, and what is expected."""
    return ValueError(f"{where} is {str(value)[:100]!r}, expected {expected}")


def check_number(where: str, value: object, *, least: int = 0, most: int = MAX_COUNT) -> None:
    """Raise ValueError unless an entry is a whole number from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise wrong_entry(where, value, f"a whole number from {least} to {most}")


def check_numbers(where: str, values: object, *, most: int = MAX_COUNT) -> None:
    """Raise ValueError unless an entry is a list of such numbers."""
    if not isinstance(values, list):
        raise wrong_entry(where, values, "a list of numbers")
    for value in values:
        check_number(where, value, most=most)


def check_text(where: str, value: object) -> None:
    """Raise ValueError unless an entry is a text."""
    if not isinstance(value, str):
        raise wrong_entry(where, value, "a text")


def check_texts(where: str, values: object, known: Collection[str] | None = None) -> None:
    """Raise ValueError unless an entry is a list of texts, of the known ones if they are given."""
    if not isinstance(values, list):
        raise wrong_entry(where, values, "a list of texts")
    for value in values:
        check_text(where, value)
        if known is not None and value not in known:
            raise wrong_entry(where, value, f"some of {list(known)}")


def check_saved_file(where: str, file: SavedFile) -> None:
    """Raise ValueError unless a file has a path within the checkpoint, and its checksums."""
    check_text(f"{where}.path", file.path)
    names = file.path.split("/")
    if any(name in ("", ".", "..") for name in names) or not file.path.isprintable():
        raise wrong_entry(f"{where}.path", file.path, "a path within the checkpoint")
    check_number(f"{where}.rows", file.rows)
    check_number(f"{where}.bytes", file.bytes)
    check_number(f"{where}.block_bytes", file.block_bytes, least=1, most=1 << 40)
    check_numbers(f"{where}.crc32c", file.crc32c, most=_MOST_CRC)
    blocks = -(-file.bytes // file.block_bytes)
    if len(file.crc32c) != blocks:
        raise ValueError(
            f"{where} has {len(file.crc32c)} checksums for {blocks} blocks of {file.path}"
        )


def check_table(where: str, table: SavedTable, groups: int | None) -> None:
    """Raise ValueError if an entry of a table has a wrong type.

    Args:
        where: prefix of the error.
        table: table of a manifest, or of a batch of changes.
        groups: number of groups; None: a table of a batch, without groups and files.
    """
    check_number(f"{where}: embedding_dim", table.embedding_dim, least=1, most=1 << 31)
    if table.dtype not in _DTYPES:
        raise wrong_entry(f"{where}: dtype", table.dtype, f"one of {list(_DTYPES)}")
    check_number(f"{where}: seed", table.seed, least=-(1 << 63), most=(1 << 63) - 1)
    if table.optimizer is not None:
        _check_optimizer(f"{where}: optimizer", table.optimizer)
    if table.padding_idx is not None:
        check_number(
            f"{where}: padding_idx", table.padding_idx, least=-(1 << 63), most=(1 << 63) - 1
        )
    for name, value in (("hyper", table.hyper), ("policy", table.policy)):
        if not isinstance(value, dict):
            raise wrong_entry(f"{where}: {name}", value, "a dict")
    check_texts(f"{where}: scores", table.scores, SCORES)
    check_number(f"{where}: step", table.step)
    check_number(f"{where}: now", table.now)
    for k, part in enumerate(table.parts):
        _check_part(f"{where}, part {k}: ", part, table, groups)


def _check_optimizer(where: str, optimizer: Any) -> None:
    """Check name and state tensors, as ``OptimizerConfig.description`` returns them."""
    if not isinstance(optimizer, dict) or optimizer.keys() != {"name", "state"}:
        raise wrong_entry(where, optimizer, "its name and its state")
    check_text(f"{where}.name", optimizer["name"])
    if not isinstance(optimizer["state"], list):
        raise wrong_entry(f"{where}.state", optimizer["state"], "a list")
    for entry in optimizer["state"]:
        kinds = [type(of) for of in entry] if isinstance(entry, list) else []
        if kinds != [str, bool, str] or entry[2] not in _STATE_DTYPES:
            raise wrong_entry(f"{where}.state", entry, "name, whether it is of rows, and dtype")


def _check_part(where: str, part: SavedPart, table: SavedTable, groups: int | None) -> None:
    check_number(f"{where}rank", part.rank)
    check_number(f"{where}first_column", part.first_column, most=table.embedding_dim - 1)
    most = table.embedding_dim - part.first_column
    check_number(f"{where}columns", part.columns, least=1, most=most)
    check_number(f"{where}slots", part.slots, least=1)
    check_number(f"{where}slots_begin", part.slots_begin, most=part.slots - 1)
    check_number(f"{where}slots_end", part.slots_end, least=part.slots_begin + 1, most=part.slots)
    check_number(f"{where}ids", part.ids)
    check_number(f"{where}ids_crc32c", part.ids_crc32c, most=_MOST_CRC)
    check_number(f"{where}group", part.group, least=NO_GROUP, most=(groups or 0) - 1)
    check_number(f"{where}number", part.number)
    check_numbers(f"{where}counters", part.counters)
    if len(part.counters) != TABLE_COLUMNS:
        raise wrong_entry(f"{where}counters", part.counters, f"{TABLE_COLUMNS} numbers")
    check_number(f"{where}optimizer_steps", part.optimizer_steps)
    check_number(f"{where}counted", part.counted)
    check_number(f"{where}removed_ids", part.removed_ids)
    check_number(f"{where}sketch_width", part.sketch_width, most=1 << 40)
    if groups is None:
        if part.files:
            raise wrong_entry(f"{where}rows", part.files, "no files, because a batch has the rows")
        return
    for k, file in enumerate(part.rows):
        check_saved_file(f"{where}rows[{k}]", file)
    if not part.rows or sum(file.rows for file in part.rows) != part.ids:
        rows = [file.rows for file in part.rows]
        raise ValueError(f"{where}its files have {rows} rows for {part.ids} ids")
    for name, of_file, rows_of_file in (
        ("counts", part.counts, part.counted),
        ("sketch", part.sketch, SKETCH_ROWS if part.sketch_width > 0 else 0),
    ):
        if of_file is not None:
            check_saved_file(f"{where}{name}", of_file)
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


__all__ = [
    "SCORES",
    "check_number",
    "check_numbers",
    "check_parts",
    "check_saved_file",
    "check_table",
    "check_text",
    "check_texts",
    "wrong_entry",
]
