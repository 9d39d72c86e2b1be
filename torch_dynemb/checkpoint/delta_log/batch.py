"""A batch of a delta log in bytes: what one publish has written, readable by itself.

A batch is a head, then records, of which the last one is the commit. Numbers are little endian, and
everything begins at a multiple of 8 bytes.

    head    magic, format version, rank, ranks, number of records, uuid of the base, sequence number
            of the base, sequence number, step, bytes of the batch, chain before, crc32c
    record  sequence number, step, kind, table, bytes, crc32c of the payload, crc32c of these; then
            the payload, filled up with zeros

The commit has the chain after the batch: a crc32c of all heads of batches and records since the
log began. A batch whose chain before is not the chain that a reader has does not follow what it has
read, even where the sequence numbers do.
"""

from __future__ import annotations

import struct
import uuid as uuids
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.checkpoint.files.tensor_file import as_bytes, raw
from torch_dynemb.errors import DamagedFileError, UnsupportedFormatError

VERSION = 1
MAGIC = b"\xd7DYNDLT\xd7"

# Kinds of records. What is here is never renumbered, only added to.
ROWS = 1  # ids of a table with their rows
ERASE = 2  # ids that are gone
DENSE = 3  # tensors of the dense part
COMMIT = 4  # the end of a batch
TABLES = 5  # what the numbers of tables in the batch mean, as JSON

_HEAD = struct.Struct("<8sIIII16sQQQQII")
_RECORD = struct.Struct("<QQIIQII")
_COMMIT = struct.Struct("<II")
_CRC = struct.Struct("<I")
_END = 0xD7E5D7E5  # no part of a commit is zeros, which a power failure leaves
HEAD_BYTES = _HEAD.size
COMMIT_BYTES = _RECORD.size + _COMMIT.size
_LEAST_BYTES = HEAD_BYTES + COMMIT_BYTES
_LARGEST = (1 << 62) - 1


class Head(NamedTuple):
    """What a batch begins with.

    Attributes:
        rank, ranks: who has written it, and how many write logs together.
        records: how many there are, the commit included.
        base: uuid of the checkpoint that the log begins with, or of a later one.
        base_sequence: of the commit whose content that checkpoint has.
        sequence: of this batch.
        step: of training.
        bytes: of the whole batch.
        previous: chain before the batch.
    """

    rank: int
    ranks: int
    records: int
    base: str
    base_sequence: int
    sequence: int
    step: int
    bytes: int
    previous: int


class Record(NamedTuple):
    """A part of a batch.

    Attributes:
        kind: ROWS, ERASE, DENSE or TABLES.
        table: its number in this batch.
        payload: uint8 [n].
    """

    kind: int
    table: int
    payload: Tensor


class Batch(NamedTuple):
    """What one publish of one rank has written.

    Attributes:
        head: of the batch.
        records: without the commit.
        chain: after the batch.
    """

    head: Head
    records: list[Record]
    chain: int


class Pieces(NamedTuple):
    """A record to be written.

    Attributes:
        kind, table: see :class:`Record`.
        pieces: contiguous tensors of the CPU, whose bytes follow each other.
    """

    kind: int
    table: int
    pieces: list[Tensor]


class BrokenBatchError(DamagedFileError):
    """Bytes that are no batch; the message says why.

    Args:
        reason: the message.
        commit: whether the commit at its end is whole.

    Attributes:
        commit: whether the commit at its end is whole.
    """

    def __init__(self, reason: str, *, commit: bool = False) -> None:
        super().__init__(reason)
        self.commit = commit


def encoded(head: Head, records: Sequence[Pieces]) -> tuple[Tensor, int]:
    """A batch as bytes.

    Args:
        head: without ``records`` and ``bytes``, which are counted here.
        records: without the commit.

    Returns:
        uint8 [bytes], and the chain after the batch.
    """
    sizes = [sum(as_bytes(piece).numel() for piece in record.pieces) for record in records]
    total = HEAD_BYTES + COMMIT_BYTES + sum(_RECORD.size + _filled(size) for size in sizes)
    head = head._replace(records=len(records) + 1, bytes=total)
    # a tensor, not a bytearray: copies into it let other threads run
    out = torch.empty(total, dtype=torch.uint8)
    text = _head_bytes(head)
    chain = _chained(text, head.previous)
    at = _put(out, 0, text)
    for record, size in zip(records, sizes, strict=True):
        payload = out[at + _RECORD.size : at + _RECORD.size + _filled(size)]
        payload[size:] = 0
        begin = 0
        for piece in map(as_bytes, record.pieces):
            payload[begin : begin + piece.numel()].copy_(piece)
            begin += piece.numel()
        text = _record_bytes(head, record.kind, record.table, size, ops.crc32c(payload[:size]))
        chain = _chained(text, chain)
        at = _put(out, at, text) + _filled(size)
    end = _COMMIT.pack(chain, _END)
    at = _put(out, at, _record_bytes(head, COMMIT, 0, len(end), _crc(end)))
    _put(out, at, end)
    return out, chain


def as_tensor(data: bytes | bytearray | memoryview) -> Tensor:
    """Bytes as uint8 [n]; the same memory where that can be."""
    if len(data) == 0:
        return torch.empty(0, dtype=torch.uint8)
    fixed = isinstance(data, bytes) or (isinstance(data, memoryview) and data.readonly)
    return torch.frombuffer(bytearray(data) if fixed else data, dtype=torch.uint8)


def head_of(text: bytes | bytearray) -> Head | None:
    """The head that some bytes begin with; None: it is damaged, or there is none.

    Args:
        text: HEAD_BYTES, or more or fewer.

    Raises:
        UnsupportedFormatError: it is a head of another format version.
        ValueError: it is a head of numbers that no batch has.
    """
    text = bytes(text[:HEAD_BYTES])
    if len(text) < HEAD_BYTES:
        return None
    (
        magic,
        version,
        rank,
        ranks,
        records,
        base,
        base_sequence,
        sequence,
        step,
        size,
        previous,
        crc,
    ) = _HEAD.unpack(text)
    if magic != MAGIC or crc != _crc(text[: -_CRC.size]):
        return None
    if version != VERSION:
        raise UnsupportedFormatError(
            f"its format version is {version}, and this library reads {VERSION}"
        )
    if size < _LEAST_BYTES or size % 8 != 0 or size > _LARGEST:
        raise ValueError(f"its head says that the batch has {size} bytes, which no batch has")
    if rank >= ranks or not base_sequence < sequence <= _LARGEST:
        raise ValueError(
            f"its head says that it is batch {sequence} of rank {rank} of {ranks} after a base "
            f"with commit {base_sequence}, which no batch is"
        )
    return Head(
        rank,
        ranks,
        records,
        uuids.UUID(bytes=base).hex,
        base_sequence,
        sequence,
        step,
        size,
        previous,
    )


def decoded(data: Tensor) -> Batch:
    """A batch of bytes, all of which are checked.

    Args:
        data: uint8 [bytes], of one batch.

    Raises:
        BrokenBatchError: they are no batch.
        UnsupportedFormatError: they are one of another format version.
    """
    try:
        head = head_of(_text(data[:HEAD_BYTES]))
    except UnsupportedFormatError:
        raise
    except ValueError as error:
        raise BrokenBatchError(str(error)) from error
    if head is None or head.bytes != data.numel():
        raise BrokenBatchError("its head is damaged")
    end = _commit_of(data, head)
    if end is None:
        raise BrokenBatchError(f"the commit of batch {head.sequence} is damaged")
    chain = _chained(_text(data[:HEAD_BYTES]), head.previous)
    at, records = HEAD_BYTES, []
    for number in range(head.records - 1):
        text = _text(data[at : at + _RECORD.size])
        where = f"record {number} of batch {head.sequence}"
        record = _record_of(text, head.sequence, head.step)
        if record is None:
            raise BrokenBatchError(f"{where} has a damaged header", commit=True)
        kind, table, size, crc = record
        if size > data.numel():
            raise BrokenBatchError(f"{where} is longer than the batch", commit=True)
        payload = data[at + _RECORD.size : at + _RECORD.size + size]
        if payload.numel() != size or ops.crc32c(payload) != crc:
            raise BrokenBatchError(f"{where} does not have its checksum", commit=True)
        if bool(data[at + _RECORD.size + size : at + _RECORD.size + _filled(size)].any()):
            raise BrokenBatchError(f"{where} is followed by other bytes than zeros", commit=True)
        chain = _chained(text, chain)
        records.append(Record(kind, table, payload))
        at += _RECORD.size + _filled(size)
    if at != data.numel() - COMMIT_BYTES or chain != end:
        raise BrokenBatchError(f"batch {head.sequence} is not what was committed", commit=True)
    return Batch(head, records, chain)


def chain_of(commit: bytes | bytearray | memoryview, sequence: int) -> int | None:
    """The chain in the commit at the end of a batch; None: it is damaged, or of another batch.

    Args:
        commit: the last COMMIT_BYTES of the batch, or more.
        sequence: number of the batch.
    """
    text = bytes(commit[-COMMIT_BYTES:])
    if len(text) < COMMIT_BYTES:
        return None
    number, step, *_ = _RECORD.unpack(text[: _RECORD.size])
    return _chain_in(text, number, step) if number == sequence else None


def _commit_of(data: Tensor, head: Head) -> int | None:
    """The chain in the commit at the end of a batch; None: it is damaged."""
    return _chain_in(_text(data[-COMMIT_BYTES:]), head.sequence, head.step)


def _chain_in(text: bytes, sequence: int, step: int) -> int | None:
    record = _record_of(text[: _RECORD.size], sequence, step)
    payload = text[_RECORD.size :]
    if record != (COMMIT, 0, _COMMIT.size, _crc(payload)):
        return None
    chain, end = _COMMIT.unpack(payload)
    return int(chain) if end == _END else None


def _head_bytes(head: Head) -> bytes:
    text = _HEAD.pack(
        MAGIC,
        VERSION,
        head.rank,
        head.ranks,
        head.records,
        uuids.UUID(hex=head.base).bytes,
        head.base_sequence,
        head.sequence,
        head.step,
        head.bytes,
        head.previous,
        0,
    )[: -_CRC.size]
    return text + _CRC.pack(_crc(text))


def _record_bytes(head: Head, kind: int, table: int, size: int, crc: int) -> bytes:
    text = _RECORD.pack(head.sequence, head.step, kind, table, size, crc, 0)[: -_CRC.size]
    return text + _CRC.pack(_crc(text))


def _record_of(text: bytes, sequence: int, step: int) -> tuple[int, int, int, int] | None:
    """Kind, table, size and checksum of a record; None: its header is damaged."""
    if len(text) < _RECORD.size:
        return None
    *of_batch, kind, table, size, payload_crc, crc = _RECORD.unpack(text)
    if crc != _crc(text[: -_CRC.size]) or of_batch != [sequence, step]:
        return None
    return kind, table, size, payload_crc


def _filled(size: int) -> int:
    return size + -size % 8


def _text(data: Tensor) -> bytes:
    return bytes(raw(data))


def _put(out: Tensor, at: int, text: bytes) -> int:
    out[at : at + len(text)] = as_tensor(text)
    return at + len(text)


def _chained(text: bytes, chain: int) -> int:
    """The chain after a head, without its own sum: of bytes with their sum, all sums are equal."""
    return _crc(text[: -_CRC.size], chain)


def _crc(text: bytes, before: int = 0) -> int:
    return ops.crc32c(as_tensor(text), before)


__all__ = [
    "COMMIT",
    "COMMIT_BYTES",
    "DENSE",
    "ERASE",
    "HEAD_BYTES",
    "MAGIC",
    "ROWS",
    "TABLES",
    "VERSION",
    "Batch",
    "BrokenBatchError",
    "Head",
    "Pieces",
    "Record",
    "as_tensor",
    "chain_of",
    "decoded",
    "encoded",
    "head_of",
]
