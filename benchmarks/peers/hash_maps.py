"""C++ hash maps int64 -> int64, called on tensors."""

from __future__ import annotations

import ctypes
import functools

import torch
from common.timing import elapsed_ms
from peers.build import build
from torch import Tensor

# name -> million lookups a second and core where the targets were set (36 M keys, all found);
# absl::flat_hash_map by the figure of the other SwissTable there, prefetched
NOTED_FIND_RATES = {
    "absl::flat_hash_map": 46.0,
    "ska::flat_hash_map": 30.0,
    "std::unordered_map": 13.0,
}
NOTED_LINE_RATE = 185.0  # million random cache lines a second and core there
PREFETCH_DISTANCES = (4, 8, 16, 32)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    signatures = {
        "create": ([ctypes.c_char_p, ctypes.c_int], pointer),
        "destroy": ([pointer], None),
        "size": ([pointer], count),
        "has_prefetch": ([pointer], ctypes.c_int),
        "find": ([pointer, pointer, pointer, count, ctypes.c_int, count], None),
        "insert": ([pointer, pointer, count, count, count], None),
        "read_lines": ([pointer, count, pointer, count, count], count),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, f"dynemb_peer_{name}")
        function.argtypes, function.restype = arguments, result
    return library


class HashMap:
    """A hash map int64 -> int64 of a C++ library.

    Args:
        name: a key of :data:`NOTED_FIND_RATES`.
        shards: number of maps that the keys are split over; insertion runs one thread a shard.
    """

    def __init__(self, name: str, *, shards: int = 1) -> None:
        self.name = name
        self._map = _library().dynemb_peer_create(name.encode(), shards)
        if not self._map:
            raise ValueError(f"name={name!r}: expected one of {sorted(NOTED_FIND_RATES)}")
        self._distance = PREFETCH_DISTANCES[1]

    def close(self) -> None:
        """Free the map's memory."""
        if self._map:
            _library().dynemb_peer_destroy(self._map)
            self._map = None

    def __len__(self) -> int:
        return int(_library().dynemb_peer_size(self._map))

    def tune_prefetch(self, keys: Tensor) -> int:
        """Take the prefetch distance at which these keys are found fastest.

        Args:
            keys: int64 [N].

        Returns:
            The distance in keys, 0 for a map that has no prefetch function.
        """
        if not _library().dynemb_peer_has_prefetch(self._map):
            self._distance = 0
            return 0

        def least_ms(distance: int) -> float:
            self._distance = distance
            return min(elapsed_ms(lambda: self.find(keys, threads=1)) for _ in range(3))

        self._distance = min(PREFETCH_DISTANCES, key=least_ms)
        return self._distance

    def find(self, keys: Tensor, *, threads: int) -> Tensor:
        """Return values of keys, -1 for those that are not there.

        Args:
            keys: int64 [N], contiguous.
            threads: number of threads, each of which looks up an equal share.

        Returns:
            int64 [N].
        """
        values = torch.empty_like(keys)
        _library().dynemb_peer_find(
            self._map, keys.data_ptr(), values.data_ptr(), len(keys), threads, self._distance
        )
        return values

    def insert(self, keys: Tensor, *, first_value: int) -> None:
        """Insert keys with values ``first_value``, ``first_value + 1``, ...

        Args:
            keys: int64 [N], contiguous.
            first_value: value of the first key.
        """
        _library().dynemb_peer_insert(
            self._map, keys.data_ptr(), first_value, len(keys), self._distance
        )


def random_line_rate(*, size_bytes: int = 1 << 30, count: int = 1 << 22) -> float:
    """Return millions of random 64-byte lines that one core reads a second, prefetched."""
    block = torch.ones(size_bytes // 8, dtype=torch.int64)
    lines = torch.randint(size_bytes // 64, (count,))

    def read(distance: int) -> None:
        _library().dynemb_peer_read_lines(
            block.data_ptr(), len(block), lines.data_ptr(), count, distance
        )

    distances = (16, 32, 64)
    best_ms = min(elapsed_ms(lambda d=d: read(d)) for d in distances for _ in range(3))
    return count / best_ms / 1e3
