"""Names of files in a checkpoint. Names are never changed, only added."""

from __future__ import annotations

import hashlib
import re
from urllib.parse import quote

from torch_dynemb.files.disk import MANIFEST, UNFINISHED

FORMAT = "torch_dynemb checkpoint"
VERSION = 1

DENSE = "dense"
STATE = "state"

FULL = "full"  # kinds of checkpoints
DELTA = "delta"

_SPOOL = re.compile(r"spool-\d+-(ids|values)")
_LONGEST_FOLDER = 120  # characters; file systems take 255 bytes


def table_folder(table: str) -> str:
    """Return the folder of a table's files. Each table name has its own folder."""
    escaped = quote(table, safe="")
    if escaped.startswith(".") or escaped in (MANIFEST, UNFINISHED) or _SPOOL.fullmatch(escaped):
        escaped = f"%{ord(escaped[0]):02X}{escaped[1:]}"
    if len(escaped) <= _LONGEST_FOLDER:
        return escaped
    digest = hashlib.sha256(table.encode()).hexdigest()[:16]
    return f"{escaped[: _LONGEST_FOLDER - 17]}-{digest}"


def rows_file(table: str, rank: int, ranks: int, columns: range, part: int) -> str:
    """Return the path of a file of rows, relative to the checkpoint.

    Args:
        table: name of the table.
        rank, ranks: the rank that writes the file, and the number of ranks.
        columns: columns of the rows.
        part: number of the file, if the rows of a rank take several files.
    """
    return (
        f"{table_folder(table)}/r{rank:03}-of-{ranks:03}."
        f"c{columns.start:03}-{columns.stop:03}.p{part:04}.safetensors"
    )


def counts_file(table: str, rank: int, ranks: int, columns: range) -> str:
    """Return the path of a file of ids that wait for admission; see :func:`rows_file`."""
    return (
        f"{table_folder(table)}/counts-r{rank:03}-of-{ranks:03}."
        f"c{columns.start:03}-{columns.stop:03}.safetensors"
    )


def sketch_file(table: str, rank: int, ranks: int) -> str:
    """Return the path of the file with a table's counting sketch."""
    return f"{table_folder(table)}/sketch-r{rank:03}-of-{ranks:03}.safetensors"


def group_file(rank: int, ranks: int, number: int) -> str:
    """Return the path of a group's file: its entries of ``table.state``, without rows."""
    return f"groups/r{rank:03}-of-{ranks:03}.g{number:03}.safetensors"


def dense_file(kind: str, rank: int, ranks: int) -> str:
    """Return the path of the file with a rank's dense state, or its tensors of ``state=``."""
    return f"{kind}/r{rank:03}-of-{ranks:03}.safetensors"


__all__ = [
    "DELTA",
    "DENSE",
    "FORMAT",
    "FULL",
    "MANIFEST",
    "STATE",
    "UNFINISHED",
    "VERSION",
    "counts_file",
    "dense_file",
    "group_file",
    "rows_file",
    "sketch_file",
    "table_folder",
]
