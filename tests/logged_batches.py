"""Batches of a delta log, without tables."""

from __future__ import annotations

import torch

from torch_dynemb.changes.batch import ERASE, Head, Pieces, as_tensor, decoded, encoded
from torch_dynemb.delta_log import DirectorySink
from torch_dynemb.files.tensor_file import raw
from torch_dynemb.ops.columns import TABLE_COLUMNS
from torch_dynemb.parts.saved_tables import NO_GROUP, SavedPart, SavedTable

BASE = "0123456789abcdef0123456789abcdef"


def logged_table(
    rank: int = 0, number: int = 0, dim: int = 4, first: int = 0, columns: int = 4
) -> SavedTable:
    """What a batch says of a table with one part, of ids of one rank."""
    counters = [0] * TABLE_COLUMNS
    part = SavedPart(rank, first, columns, 0, 1, 1, 0, 0, NO_GROUP, number, counters, 0, [])
    return SavedTable(dim, "float32", 0, None, {}, None, [], {}, 1, 0, [part])


def batch(sequence: int, previous: int, size: int = 1) -> tuple[bytes, int]:
    """A batch with one record, and the chain after it."""
    head = Head(0, 1, 0, BASE, 0, sequence, 10 * sequence, 0, previous)
    data, chain = encoded(head, [Pieces.of(ERASE, 0, [torch.full((size,), 7 * sequence)])])
    return bytes(raw(data)), chain


def batches(count: int, size: int = 1) -> list[bytes]:
    result, chain = [], 0
    for sequence in range(1, count + 1):
        data, chain = batch(sequence, chain, size)
        result.append(data)
    return result


def read(sink: DirectorySink, from_sequence: int = 0) -> list[int]:
    return [decoded(as_tensor(data)).head.sequence for data in sink.read(from_sequence)]
