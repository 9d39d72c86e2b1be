"""Rows by id in RocksDB, called on tensors."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from peers.build import build_rocksdb
from torch import Tensor


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_rocksdb()))
    pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    signatures = {
        "open": ([ctypes.c_char_p, count, count], pointer),
        "close": ([pointer], None),
        "write": ([pointer, pointer, pointer, count], flag),
        "read": ([pointer, pointer, pointer, count, count], count),
        "settle": ([pointer], flag),
        "drain": ([pointer], None),
        "written": ([pointer], count),
        "disk": ([pointer], count),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, f"dynemb_rocksdb_{name}")
        function.argtypes, function.restype = arguments, result
    return library


class RocksDBRows:
    """Rows in a database of their own.

    Args:
        path: of the database; made.
        row_bytes: of a row.
        cache_bytes: of blocks in memory.
    """

    def __init__(self, path: Path, row_bytes: int, cache_bytes: int = 8 << 20) -> None:
        self._db = _library().dynemb_rocksdb_open(str(path).encode(), row_bytes, cache_bytes)
        if not self._db:
            raise RuntimeError(f"RocksDB cannot open {path}")

    def close(self) -> None:
        """End the use of the database."""
        if self._db:
            _library().dynemb_rocksdb_close(self._db)
            self._db = None

    def write(self, ids: Tensor, records: Tensor) -> None:
        """Write rows uint8 [n, row_bytes] of ids int64 [n]."""
        args = (ids.data_ptr(), records.data_ptr(), len(ids))
        if not _library().dynemb_rocksdb_write(self._db, *args):
            raise RuntimeError("RocksDB cannot write")

    def read(self, ids: Tensor, out: Tensor, *, threads: int) -> int:
        """Read rows of ids int64 [n] into uint8 [n, row_bytes]; return how many exist."""
        args = (ids.data_ptr(), out.data_ptr(), len(ids), threads)
        return int(_library().dynemb_rocksdb_read(self._db, *args))

    def settle(self) -> None:
        """Wait until there is nothing left to compact."""
        if not _library().dynemb_rocksdb_settle(self._db):
            raise RuntimeError("RocksDB cannot compact")

    def drain(self) -> None:
        """Wait for flushes and compactions that have begun or are due."""
        _library().dynemb_rocksdb_drain(self._db)

    @property
    def bytes_written(self) -> int:
        """By flushes and compactions, since it was opened."""
        return int(_library().dynemb_rocksdb_written(self._db))

    @property
    def disk_bytes(self) -> int:
        """Of its files."""
        return int(_library().dynemb_rocksdb_disk(self._db))
