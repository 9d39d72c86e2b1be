"""What a store of rows that is written elsewhere has to do."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RecordStore(Protocol):
    """Records by table and id, such as in a key-value store. Called by one thread.

    A record is uint8 [bytes], the same number of bytes for all ids of a table: a header of 24 bytes
    (4 that the store may use, such as for a checksum, and that are not read; table number, int32;
    handle of the row, int64; id, int64), the weights, each tensor of optimizer state, and zeros up
    to a multiple of 8. The store gives back what it was given last for an id. It may give records
    of ids that have been evicted meanwhile: the handle tells them apart.
    """

    def read(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        """Reads records.

        Args:
            table: its name.
            ids: int64 [n], distinct.
            out: uint8 [n, bytes], to be filled.

        Returns:
            bool [n], which ids have a record.
        """

    def write(self, table: str, ids: Tensor, records: Tensor) -> object:
        """Writes records, in place of those that there are; it may keep neither tensor.

        Args:
            table: its name.
            ids: int64 [n], distinct.
            records: uint8 [n, bytes].
        """

    def erase(self, table: str, ids: Tensor) -> object:
        """Is told that ids have been removed from the table.

        Args:
            table: its name.
            ids: int64 [n]; some may have no record.
        """


__all__ = ["RecordStore"]
