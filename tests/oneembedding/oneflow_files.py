"""Writes files as OneFlow's OneEmbedding lays them out, from the description of its layout.

It uses nothing of torch_dynemb, and only the standard library: what the importer reads is written
by other code than its own.

    <folder of a rank>/LOCK
    <folder of a rank>/KEY_SIZE, VALUE_SIZE, PHYSICAL_BLOCK_SIZE, NUM_LOGICAL_BLOCKS_PER_CHUNK
        a decimal number and a line break
    <folder of a rank>/keys/key-000000000000         keys by row number, little endian
    <folder of a rank>/values/value-000000000000     blocks of values, padded to whole sectors
    <folder of a rank>/snapshots/NAME/LIST           names of the index files, one in a line
    <folder of a rank>/snapshots/NAME/index-000000000000
        uint64 row numbers, counted through all chunks, in any order

Every write appends whole blocks: what is left of the last one stays unused, and a key that is
written again gets another row. The rank of an id is xxh64(id, seed 1) modulo the number of ranks.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

MASK = (1 << 64) - 1
P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def _rotated(x: int, by: int) -> int:
    return (x << by | x >> (64 - by)) & MASK


def xxh64(data: bytes, seed: int) -> int:
    """xxHash64 of 8 bytes (github.com/Cyan4973/xxHash, doc/xxhash_spec.md)."""
    (lane,) = struct.unpack("<Q", data)
    accumulator = (seed + P5 + len(data)) & MASK
    accumulator ^= _rotated(lane * P2 & MASK, 31) * P1 & MASK
    accumulator = (_rotated(accumulator, 27) * P1 + P4) & MASK
    accumulator = (accumulator ^ accumulator >> 33) * P2 & MASK
    accumulator = (accumulator ^ accumulator >> 29) * P3 & MASK
    return accumulator ^ accumulator >> 32


class Shard:
    """The folder of a rank.

    Args:
        folder: of the rank.
        key_format: of one key, for ``struct``: q, i, Q or I.
        elements: float32 values of a row.
        block: bytes of a sector.
        blocks_per_chunk: so few that there are several chunks.
    """

    def __init__(
        self, folder: Path, key_format: str, elements: int, block: int, blocks_per_chunk: int
    ) -> None:
        self.folder, self.key_format, self.elements = folder, key_format, elements
        self.value_size = 4 * elements
        self.logical = -(-self.value_size // block) * block
        self.per_block = self.logical // self.value_size
        self.per_chunk = self.per_block * blocks_per_chunk
        self.rows = 0
        self.row_of: dict[int, int] = {}
        for name in ("keys", "values", "snapshots"):
            (folder / name).mkdir(parents=True)
        (folder / "LOCK").touch()
        sizes = {
            "KEY_SIZE": struct.calcsize("<" + key_format),
            "VALUE_SIZE": self.value_size,
            "PHYSICAL_BLOCK_SIZE": block,
            "NUM_LOGICAL_BLOCKS_PER_CHUNK": blocks_per_chunk,
        }
        for name, size in sizes.items():
            (folder / name).write_text(f"{size}\n")

    def put(self, rows: Mapping[int, Sequence[float]]) -> None:
        """Appends rows, and leaves the rest of the last block unused."""
        for row, (key, values) in enumerate(rows.items(), self.rows):
            chunk, in_chunk = divmod(row, self.per_chunk)
            block, in_block = divmod(in_chunk, self.per_block)
            packed = struct.pack(f"<{self.elements}f", *values)
            place = block * self.logical + in_block * self.value_size
            self._write(f"values/value-{chunk:012}", place, packed, (block + 1) * self.logical)
            key_bytes = struct.pack("<" + self.key_format, key)
            self._write(f"keys/key-{chunk:012}", in_chunk * len(key_bytes), key_bytes, 0)
            self.row_of[key] = row
        blocks = -(-len(rows) // self.per_block)
        self.rows += blocks * self.per_block

    def _write(self, name: str, place: int, data: bytes, least: int) -> None:
        path = self.folder / name
        path.touch()
        with path.open("r+b") as file:
            file.seek(place)
            file.write(data)
            file.truncate(max(least, file.seek(0, 2)))

    def snapshot(self, name: str) -> None:
        folder = self.folder / "snapshots" / name
        folder.mkdir(parents=True)
        by_chunk: dict[int, list[int]] = {}
        for row in self.row_of.values():
            by_chunk.setdefault(row // self.per_chunk, []).append(row)
        lines = []
        for chunk, rows in sorted(by_chunk.items()):
            random.Random(chunk).shuffle(rows)
            lines.append(f"index-{chunk:012}\n")
            packed = struct.pack(f"<{len(rows)}Q", *rows)
            (folder / f"index-{chunk:012}").write_bytes(packed)
        (folder / "LIST").write_text("".join(lines))


def write_table(
    root: Path,
    writes: Sequence[Mapping[int, Sequence[float]]],
    *,
    ranks: int = 1,
    key_format: str = "q",
    block: int = 4096,
    blocks_per_chunk: int = 4,
    snapshot: str = "last",
) -> list[str]:
    """Writes rows as so many ranks would, and takes a snapshot; returns the folders of the ranks.

    Args:
        root: above the folders.
        writes: rows by key, one write after another.
        ranks: how many there are.
        key_format, block, blocks_per_chunk: see :class:`Shard`.
        snapshot: its name.
    """
    elements = len(next(iter(writes[0].values())))
    shards = [
        Shard(root / f"{rank}-{ranks}", key_format, elements, block, blocks_per_chunk)
        for rank in range(ranks)
    ]
    bits = 8 * struct.calcsize("<" + key_format)
    for rows in writes:
        by_rank: list[dict[int, Sequence[float]]] = [{} for _ in shards]
        for key, values in rows.items():
            data = struct.pack("<Q", key & ((1 << bits) - 1))
            by_rank[xxh64(data, 1) % ranks][key] = values
        for shard, own in zip(shards, by_rank, strict=True):
            shard.put(own)
    for shard in shards:
        shard.snapshot(snapshot)
    return [str(shard.folder) for shard in shards]
