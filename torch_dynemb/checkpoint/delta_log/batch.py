"""A batch of changes in bytes, readable by itself: a commit of a delta log, or an increment.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
COUNTS = 6  # ids of a table that wait for admission
SKETCH = 7  # the counting sketch of a table

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
        kind: one of the kinds above, but COMMIT.
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
        bytes: of the payload.
        make: gives contiguous tensors of the CPU, whose bytes follow each other.
    """

    kind: int
    table: int
    bytes: int
    make: Callable[[], Iterable[Tensor]]

    @staticmethod
    def of(kind: int, table: int, tensors: Sequence[Tensor]) -> Pieces:
        """A record of tensors that are there.

        Args:
            kind, table: see :class:`Record`.
            tensors: contiguous, of the CPU.
        """
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return Pieces(kind, table, size, lambda: tensors)


class RecordPlace(NamedTuple):
    """A record in the bytes of a batch.

    Attributes:
        kind, table: see :class:`Record`.
        begin, bytes: of the payload.
        crc32c: of the payload.
    """

    kind: int
    table: int
    begin: int
    bytes: int
    crc32c: int


class BatchIndex(NamedTuple):
    """Where the records of a batch lie.

    Attributes:
        head: of the batch.
        places: of the records, without the commit.
        chain: after the batch.
    """

    head: Head
    places: list[RecordPlace]
    chain: int


Read = Callable[[int, int], Tensor]  # the first byte and how many give uint8 [n], fewer at the end


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


def pieces_of_batch(head: Head, records: Sequence[Pieces]) -> Iterator[Tensor]:
    """The bytes of a batch, piece by piece; one record at a time is in memory.

    Args:
        head: without ``records`` and ``bytes``, which are counted here.
        records: without the commit.

    Returns:
        An iterator of uint8 [n].

    Raises:
        RuntimeError: a record has another size than it should have.
    """
    total = sum(_RECORD.size + _filled(record.bytes) for record in records)
    total += HEAD_BYTES + COMMIT_BYTES
    head = head._replace(records=len(records) + 1, bytes=total)
    text = _head_bytes(head)
    chain = _chained(text, head.previous)
    yield as_tensor(text)
    for record in records:
        pieces = [as_bytes(piece) for piece in record.make()]
        size, crc = sum(piece.numel() for piece in pieces), 0
        if size != record.bytes:
            raise RuntimeError(
                f"checkpoint: a record of table {record.table} has {size} bytes, expected "
                f"{record.bytes}: the tables changed while they were saved"
            )
        for piece in pieces:
            crc = ops.crc32c(piece, crc)
        text = _record_bytes(head, record.kind, record.table, size, crc)
        chain = _chained(text, chain)
        yield as_tensor(text)
        yield from pieces
        yield torch.zeros(_filled(size) - size, dtype=torch.uint8)
    end = _COMMIT.pack(chain, _END)
    yield as_tensor(_record_bytes(head, COMMIT, 0, len(end), _crc(end)) + end)


def encoded(head: Head, records: Sequence[Pieces]) -> tuple[Tensor, int]:
    """A batch as bytes.

    Args:
        head, records: see :func:`pieces_of_batch`.

    Returns:
        uint8 [bytes], and the chain after the batch.
    """
    # a tensor, not a bytearray: copies into it let other threads run
    size = sum(_RECORD.size + _filled(record.bytes) for record in records)
    out, at = torch.empty(HEAD_BYTES + size + COMMIT_BYTES, dtype=torch.uint8), 0
    for piece in pieces_of_batch(head, records):
        out[at : at + piece.numel()].copy_(piece)
        at += piece.numel()
    chain, _ = _COMMIT.unpack(_text(out[-_COMMIT.size :]))
    return out, int(chain)


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

    def read(begin: int, size: int) -> Tensor:
        return data[begin : begin + size]

    index = index_of(data.numel(), read)
    records = [
        Record(place.kind, place.table, payload_of(index, number, read))
        for number, place in enumerate(index.places)
    ]
    return Batch(index.head, records, index.chain)


def index_of(size: int, read: Read) -> BatchIndex:
    """Where the records of a batch lie; its head, their headers and the commit are checked.

    Args:
        size: of the batch.
        read: gives its bytes.

    Raises:
        BrokenBatchError: they are no batch.
        UnsupportedFormatError: they are one of another format version.
    """
    first = _text(read(0, HEAD_BYTES))
    try:
        head = head_of(first)
    except UnsupportedFormatError:
        raise
    except ValueError as error:
        raise BrokenBatchError(str(error)) from error
    if head is None or head.bytes != size:
        raise BrokenBatchError("its head is damaged")
    last = _text(read(size - COMMIT_BYTES, COMMIT_BYTES))
    end = _chain_in(last, head.sequence, head.step)
    if end is None:
        raise BrokenBatchError(f"the commit of batch {head.sequence} is damaged")
    chain = _chained(first, head.previous)
    at, places = HEAD_BYTES, list[RecordPlace]()
    for number in range(head.records - 1):
        text = _text(read(at, _RECORD.size))
        record = _record_of(text, head.sequence, head.step)
        if record is None:
            where = f"record {number} of batch {head.sequence}"
            raise BrokenBatchError(f"{where} has a damaged header", commit=True)
        kind, table, bytes_of, crc = record
        if bytes_of > size:
            where = f"record {number} of batch {head.sequence}"
            raise BrokenBatchError(f"{where} is longer than the batch", commit=True)
        places.append(RecordPlace(kind, table, at + _RECORD.size, bytes_of, crc))
        chain = _chained(text, chain)
        at += _RECORD.size + _filled(bytes_of)
    if at != size - COMMIT_BYTES or chain != end:
        raise BrokenBatchError(f"batch {head.sequence} is not what was committed", commit=True)
    return BatchIndex(head, places, chain)


def payload_of(index: BatchIndex, number: int, read: Read) -> Tensor:
    """The payload of a record, checked; uint8 [n].

    Args:
        index: of the batch.
        number: of the record.
        read: gives bytes of the batch.

    Raises:
        BrokenBatchError: it is damaged.
    """
    place = index.places[number]
    where = f"record {number} of batch {index.head.sequence}"
    data = read(place.begin, _filled(place.bytes))
    payload = data[: place.bytes]
    if payload.numel() != place.bytes or ops.crc32c(payload) != place.crc32c:
        raise BrokenBatchError(f"{where} does not have its checksum", commit=True)
    if bool(data[place.bytes :].any()):
        raise BrokenBatchError(f"{where} is followed by other bytes than zeros", commit=True)
    return payload


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


def _chained(text: bytes, chain: int) -> int:
    """The chain after a head, without its own sum: of bytes with their sum, all sums are equal."""
    return _crc(text[: -_CRC.size], chain)


def _crc(text: bytes, before: int = 0) -> int:
    return ops.crc32c(as_tensor(text), before)


__all__ = [
    "COMMIT",
    "COMMIT_BYTES",
    "COUNTS",
    "DENSE",
    "ERASE",
    "HEAD_BYTES",
    "MAGIC",
    "ROWS",
    "SKETCH",
    "TABLES",
    "VERSION",
    "Batch",
    "BatchIndex",
    "BrokenBatchError",
    "Head",
    "Pieces",
    "Read",
    "Record",
    "RecordPlace",
    "as_tensor",
    "chain_of",
    "decoded",
    "encoded",
    "head_of",
    "index_of",
    "payload_of",
    "pieces_of_batch",
]
