"""Protocol of a user's store of rows."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RecordStore(Protocol):
    """Records by table and id, such as in a key-value store. Called by one thread.

    A record is uint8 [bytes], with the same size for all ids of a table::

        offset  bytes  content
        0       4      free for the store, such as for a checksum; never read
        4       4      table number, int32
        8       8      handle of the row, int64
        16      8      id, int64
        24             weights, then each tensor of optimizer state
                       zeros up to a multiple of 8

    The store returns the last record written for an id. It may return records of evicted ids: their
    handle differs from the current one.
    """

    def read(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        """Read records.

        Args:
            table: its name.
            ids: int64 [n], distinct.
            out: uint8 [n, bytes], to be filled.

        Returns:
            bool [n], whether each id has a record.
        """

    def write(self, table: str, ids: Tensor, records: Tensor) -> object:
        """Write records, in place of earlier ones; the store must not keep the tensors.

        Args:
            table: its name.
            ids: int64 [n], distinct.
            records: uint8 [n, bytes].
        """

    def erase(self, table: str, ids: Tensor) -> object:
        """Erase records of ids that were removed from the table.

        Args:
            table: its name.
            ids: int64 [n]; some may have no record.
        """


__all__ = ["RecordStore"]
