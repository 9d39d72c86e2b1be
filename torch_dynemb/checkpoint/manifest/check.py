"""Checks of a manifest, beyond its checksum, which a crafted file can match.

A load trusts what is checked here: numbers that become sizes and places, paths, and that the parts
of a table add up to the whole table.
"""

from __future__ import annotations

from torch_dynemb.checkpoint.file_names import DELTA, FULL
from torch_dynemb.checkpoint.manifest.records import Manifest, SavedDense
from torch_dynemb.files.commit import is_uuid
from torch_dynemb.parts.saved_checks import (
    SCORES,
    check_number,
    check_numbers,
    check_parts,
    check_saved_file,
    check_table,
    check_text,
    check_texts,
    wrong_entry,
)


def check_manifest(manifest: Manifest) -> None:
    """Raise ValueError if an entry has a wrong type, or contradicts another one."""
    check_text("uuid", manifest.uuid)
    if manifest.kind not in (FULL, DELTA):
        raise wrong_entry("kind", manifest.kind, f"{FULL!r} or {DELTA!r}")
    if manifest.parent is not None:
        check_text("parent", manifest.parent)
    if (manifest.parent is not None) != (manifest.kind == DELTA):
        raise ValueError(
            f"kind is {manifest.kind!r}, but parent is {manifest.parent!r}: increments have one"
        )
    check_number("ranks", manifest.ranks, least=1)
    for k, old in enumerate(manifest.series):
        check_texts(f"series[{k}]", [old.name, old.uuid])
        if old.name in ("", ".", "..") or set(old.name) & set("/\0"):
            raise wrong_entry(f"series[{k}].name", old.name, "the name of a folder")
        if not is_uuid(old.uuid):
            raise wrong_entry(f"series[{k}].uuid", old.uuid, "32 hexadecimal digits")
    for k, group in enumerate(manifest.groups):
        check_number(f"groups[{k}].rank", group.rank)
        check_texts(f"groups[{k}].tables", group.tables)
        check_texts(f"groups[{k}].score_words", group.score_words, SCORES)
        check_saved_file(f"groups[{k}].file", group.file)
        check_numbers(f"groups[{k}].stored", group.stored)
    for name, table in manifest.tables.items():
        check_table(f"table {name!r}", table, len(manifest.groups))
        check_parts(name, table)
    for k, file in enumerate(manifest.changes):
        check_saved_file(f"changes[{k}]", file)
    batches = manifest.ranks if manifest.kind == DELTA else 0
    if len(manifest.changes) != batches or (batches and manifest.tables):
        raise ValueError(
            f"kind is {manifest.kind!r}, of {manifest.ranks} ranks, but it has "
            f"{len(manifest.changes)} batches of changes and {len(manifest.tables)} tables"
        )
    for kind, dense in (("dense", manifest.dense), ("state", manifest.state)):
        _check_dense(kind, dense)
    if not isinstance(manifest.dense.values, dict | None):
        raise wrong_entry("dense.values", manifest.dense.values, "a dict or null")


# -- dense state and state= ----------------------------------------------------------------------


def _check_dense(kind: str, dense: SavedDense) -> None:
    for k, file in enumerate(dense.files):
        check_saved_file(f"{kind}.files[{k}]", file)
    for name, entries in dense.entries.items():
        where = f"{kind}: entry {name!r}"
        if not entries:
            raise ValueError(f"{where} has no pieces")
        for entry in entries:
            check_number(f"{where}: file", entry.file, most=len(dense.files) - 1)
            check_text(f"{where}: tensor", entry.tensor)
            check_numbers(f"{where}: offsets", entry.offsets)
            check_numbers(f"{where}: sizes", entry.sizes)
            _check_place(where, entry.offsets, entry.sizes)


def _check_place(where: str, offsets: list[int], sizes: list[int]) -> None:
    beyond = any(offset > size for offset, size in zip(offsets, sizes, strict=False))
    if len(offsets) != len(sizes) or beyond:
        raise ValueError(f"{where} has a piece at {offsets} of a tensor of sizes {sizes}")


__all__ = ["check_manifest"]
