"""Bytes of a batch of changes: a commit of a delta log, or an increment.

A batch is self-contained: a head, then records, of which the last one is the commit. Numbers are
little endian, and everything begins at a multiple of 8 bytes. ::

    +------+----------------+----------------+-----+--------+
    | head | record payload | record payload | ... | commit |
    +------+----------------+----------------+-----+--------+

    head    magic 8, format version 4, rank 4, ranks 4, number of records 4, uuid of the base 16,
            sequence of the base 8, sequence 8, step 8, bytes of the batch 8, chain before 4,
            crc32c of the head 4
    record  sequence 8, step 8, kind 4, table 4, bytes of the payload 8, crc32c of the payload 4,
            crc32c of the header 4; then the payload, padded with zeros to 8 bytes
    commit  a record with the payload: chain after 4, end mark 4

The chain is a crc32c of all heads of batches and headers of records since the log began. It detects
a batch that does not follow what a reader has read, even if the sequence numbers match.
"""

from __future__ import annotations

import struct
import uuid as uuids
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import DamagedFileError, UnsupportedFormatError
from torch_dynemb.files.tensor_file import as_bytes, raw

VERSION = 1
MAGIC = b"\xd7DYNDLT\xd7"

# Kinds of records. They are never renumbered, only added.
ROWS = 1  # ids of a table with their rows
ERASE = 2  # removed ids
DENSE = 3  # tensors of the dense state
COMMIT = 4  # the end of a batch
TABLES = 5  # descriptions of the tables by their numbers in the batch, as JSON
COUNTS = 6  # ids of a table that wait for admission
SKETCH = 7  # the counting sketch of a table
STATE = 8  # the state that a program resumes with; each batch of a resumable log has one
CHANGED_COUNTS = 9  # ids with another count than in the commit before; 0: it waits no longer
CHANGED_CELLS = 10  # cells of the counting sketch that differ from the commit before
KINDS = frozenset(range(ROWS, CHANGED_CELLS + 1)) - {COMMIT}

_HEAD = struct.Struct("<8sIIII16sQQQQII")
_RECORD = struct.Struct("<QQIIQII")
_COMMIT = struct.Struct("<II")
_CRC = struct.Struct("<I")
_END = 0xD7E5D7E5  # a commit has no zero sector, which a power failure may leave
HEAD_BYTES = _HEAD.size
COMMIT_BYTES = _RECORD.size + _COMMIT.size
_LEAST_BYTES = HEAD_BYTES + COMMIT_BYTES
_LARGEST = (1 << 62) - 1


class Head(NamedTuple):
    """Head of a batch.

    Attributes:
        rank, ranks: rank that wrote it, and number of ranks that write logs together.
        records: number of records, the commit included.
        base: uuid of the checkpoint that the log begins with, or of a later one.
        base_sequence: number of the last commit that this checkpoint includes.
        sequence: number of this batch.
        step: training step.
        bytes: size of the whole batch.
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
    """A record of a batch.

    Attributes:
        kind: one of the kinds above except COMMIT.
        table: number of the table in this batch.
        payload: uint8 [n].
    """

    kind: int
    table: int
    payload: Tensor


class Batch(NamedTuple):
    """Content of one publish of one rank.

    Attributes:
        head: head of the batch.
        records: records without the commit.
        chain: chain after the batch.
    """

    head: Head
    records: list[Record]
    chain: int


class Pieces(NamedTuple):
    """A record to be written.

    Attributes:
        kind, table: see :class:`Record`.
        bytes: size of the payload.
        make: returns contiguous CPU tensors, the consecutive bytes of the payload.
    """

    kind: int
    table: int
    bytes: int
    make: Callable[[], Iterable[Tensor]]

    @staticmethod
    def of(kind: int, table: int, tensors: Sequence[Tensor]) -> Pieces:
        """Make a record of existing tensors.

        Args:
            kind, table: see :class:`Record`.
            tensors: contiguous, on the CPU.
        """
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return Pieces(kind, table, size, lambda: tensors)

    def read(self) -> Pieces:
        """Read the payload now, so that the record stays as it is while training goes on."""
        return Pieces.of(self.kind, self.table, list(self.make()))


class RecordPlace(NamedTuple):
    """Place of a record in the bytes of a batch.

    Attributes:
        kind, table: see :class:`Record`.
        begin, bytes: place of the payload.
        crc32c: checksum of the payload.
    """

    kind: int
    table: int
    begin: int
    bytes: int
    crc32c: int


class BatchIndex(NamedTuple):
    """Places of the records of a batch.

    Attributes:
        head: head of the batch.
        places: places of the records, without the commit.
        chain: chain after the batch.
    """

    head: Head
    places: list[RecordPlace]
    chain: int


Read = Callable[[int, int], Tensor]  # (first byte, number of bytes) -> uint8 [n], fewer at the end


class BrokenBatchError(DamagedFileError):
    """Bytes that are not a valid batch; the message says why.

    Args:
        reason: the message.
        commit: whether the commit at its end is intact.

    Attributes:
        commit: whether the commit at its end is intact.
    """

    def __init__(self, reason: str, *, commit: bool = False) -> None:
        super().__init__(reason)
        self.commit = commit


def pieces_of_batch(head: Head, records: Sequence[Pieces]) -> Iterator[Tensor]:
    """Encode a batch piece by piece, with one record at a time in memory.

    Args:
        head: head; ``records`` and ``bytes`` are computed here.
        records: records without the commit.

    Returns:
        An iterator of uint8 [n].

    Raises:
        RuntimeError: a record has another size than announced.
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
        yield torch.zeros(_filled(size) - size, dtype=torch.uint8, device="cpu")
    end = _COMMIT.pack(chain, _END)
    yield as_tensor(_record_bytes(head, COMMIT, 0, len(end), _crc(end)) + end)


def encoded(head: Head, records: Sequence[Pieces]) -> tuple[Tensor, int]:
    """Encode a batch.

    Args:
        head, records: see :func:`pieces_of_batch`.

    Returns:
        uint8 [bytes], and the chain after the batch.
    """
    # a tensor, not a bytearray: copying into it releases the GIL
    size = sum(_RECORD.size + _filled(record.bytes) for record in records)
    out, at = torch.empty(HEAD_BYTES + size + COMMIT_BYTES, dtype=torch.uint8, device="cpu"), 0
    for piece in pieces_of_batch(head, records):
        out[at : at + piece.numel()].copy_(piece)
        at += piece.numel()
    chain, _ = _COMMIT.unpack(_text(out[-_COMMIT.size :]))
    return out, int(chain)


def as_tensor(data: bytes | bytearray | memoryview) -> Tensor:
    """View bytes as uint8 [n]; copies only read-only memory."""
    if len(data) == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    fixed = isinstance(data, bytes) or (isinstance(data, memoryview) and data.readonly)
    return torch.frombuffer(bytearray(data) if fixed else data, dtype=torch.uint8)


def head_of(text: bytes | bytearray) -> Head | None:
    """Decode the head at the beginning of some bytes; None if it is damaged or missing.

    Args:
        text: HEAD_BYTES, or more or fewer.

    Raises:
        UnsupportedFormatError: the head has another format version.
        ValueError: the head has impossible numbers.
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
            f"its format version is {version}, but this library reads {VERSION}"
        )
    if size < _LEAST_BYTES or size % 8 != 0 or size > _LARGEST:
        raise ValueError(f"its head has an impossible batch size of {size} bytes")
    if rank >= ranks or not base_sequence < sequence <= _LARGEST:
        raise ValueError(
            f"its head has impossible numbers: batch {sequence} of rank {rank} of {ranks} after a "
            f"base with commit {base_sequence}"
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
    """Decode a batch and check all of its bytes.

    Args:
        data: uint8 [bytes] of one batch.

    Raises:
        BrokenBatchError: it is not a valid batch.
        UnsupportedFormatError: it has another format version.
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
    """Find the records of a batch. Its head, record headers and commit are checked.

    Args:
        size: size of the batch.
        read: reads its bytes.

    Raises:
        BrokenBatchError: it is not a valid batch.
        UnsupportedFormatError: it has another format version.
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
    """Read and check the payload of a record, uint8 [n].

    Args:
        index: places of the batch.
        number: number of the record.
        read: reads bytes of the batch.

    Raises:
        BrokenBatchError: it is damaged.
    """
    place = index.places[number]
    where = f"record {number} of batch {index.head.sequence}"
    data = read(place.begin, _filled(place.bytes))
    payload = data[: place.bytes]
    if payload.numel() != place.bytes or ops.crc32c(payload) != place.crc32c:
        raise BrokenBatchError(f"{where} has a wrong checksum", commit=True)
    if bool(data[place.bytes :].any()):
        raise BrokenBatchError(f"{where} is not padded with zeros", commit=True)
    return payload


def chain_of(commit: bytes | bytearray | memoryview, sequence: int) -> int | None:
    """Return the chain in the commit of a batch; None if it is damaged, or of another batch.

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
    """Return kind, table, size and checksum of a record; None if its header is damaged."""
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
    """Update the chain with a head or header, without its checksum.

    A crc32c over bytes followed by their own checksum is constant, and would carry no information.
    """
    return _crc(text[: -_CRC.size], chain)


def _crc(text: bytes, before: int = 0) -> int:
    return ops.crc32c(as_tensor(text), before)


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


__all__ = [
    "CHANGED_CELLS",
    "CHANGED_COUNTS",
    "COMMIT",
    "COMMIT_BYTES",
    "COUNTS",
    "DENSE",
    "ERASE",
    "HEAD_BYTES",
    "KINDS",
    "MAGIC",
    "ROWS",
    "SKETCH",
    "STATE",
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
    "rank_folder",
    "segment_file",
]
