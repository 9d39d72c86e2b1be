"""Names of files and tensors in a checkpoint. Names are never changed, only added."""

from __future__ import annotations

import hashlib
import re
from urllib.parse import quote

from torch_dynemb.files.disk import MANIFEST, UNFINISHED

FORMAT = "torch_dynemb checkpoint"
VERSION = 1

DENSE = "dense"
STATE = "state"

ID = "id"  # int64 [n]
WEIGHT = "weight"  # [n, columns]
COUNT = "count"  # int64 [n], of an id that waits for admission
SKETCH = "sketch"  # int32 [rows, width]
PLACE = "place"  # int64 [n], of changed cells in a sketch

FULL = "full"  # kinds of checkpoints
DELTA = "delta"

NO_GROUP = -1  # group number of a part without saved places of ids and rows

_SPOOL = re.compile(r"spool-\d+-(ids|values)")
_LONGEST_FOLDER = 120  # characters; file systems take 255 bytes


def weight_entry(form: str | None) -> str:
    """Return the name of the rows in a batch: those of the table, or in a form of a log."""
    return WEIGHT if form is None else f"{WEIGHT}.{form}"


def state_entry(name: str) -> str:
    """Return the name of an optimizer state tensor."""
    return f"state.{name}"


def score_entry(word: str) -> str:
    """Return the name of a score tensor.

    The word is ``step``, ``timestamp``, ``frequency``, ``custom`` or ``expiry``.
    """
    return f"score.{word}"


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


def rank_folder(rank: int, ranks: int) -> str:
    """Return the folder of a rank's batches, in a delta log or an increment.

    Args:
        rank: rank of the process.
        ranks: number of ranks that write.
    """
    return f"r{rank:03}-of-{ranks:03}"


def segment_file(sequence: int) -> str:
    """Return the name of a file of batches, given the number of its first batch."""
    return f"{sequence:020}.delta"


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
    "COUNT",
    "DELTA",
    "DENSE",
    "FORMAT",
    "FULL",
    "ID",
    "MANIFEST",
    "NO_GROUP",
    "PLACE",
    "SKETCH",
    "STATE",
    "UNFINISHED",
    "VERSION",
    "WEIGHT",
    "counts_file",
    "dense_file",
    "group_file",
    "rank_folder",
    "rows_file",
    "score_entry",
    "segment_file",
    "sketch_file",
    "state_entry",
    "table_folder",
    "weight_entry",
]
