"""One storage for tables of several groups, or of several ranks: each has its own part of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from torch import Tensor

from torch_dynemb.storage.tiers.configs import ExternalStore, Storage
from torch_dynemb.storage.tiers.protocol import RecordStore

# File systems take 255 bytes; what is longer is cut, and a hash tells it from others.
_LONGEST_NAME = 100


@dataclass(frozen=True)
class StoreOfModule:
    """The tables of one module in a store that other modules use as well.

    Args:
        store: of all of them.
        module: comes before the names of its tables: ``<module>.<table>``.
    """

    store: RecordStore
    module: str

    def name(self, table: str) -> str:
        """What the store calls a table.

        Args:
            table: its name in the module.
        """
        return f"{self.module}.{table}"

    def read(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        """See :meth:`RecordStore.read`."""
        return self.store.read(self.name(table), ids, out)

    def write(self, table: str, ids: Tensor, records: Tensor) -> object:
        """See :meth:`RecordStore.write`."""
        return self.store.write(self.name(table), ids, records)

    def erase(self, table: str, ids: Tensor) -> object:
        """See :meth:`RecordStore.erase`."""
        return self.store.erase(self.name(table), ids)


def part_of_storage(
    storage: Storage, module: str, tables: Sequence[str], *, rank: int, ranks: int
) -> Storage:
    """What a group of tables has of a storage that other groups and ranks are given, too.

    Args:
        storage: of all of them.
        module: names the module that has the group; empty: names of tables say enough.
        tables: names of those of the group; a table is in one group of its module and rank only.
        rank, ranks: which rank of how many has the group.

    Returns:
        An SSDStore in the directory ``<path>/<module>/<tables>/rank<r>of<n>``, the same in every
        run of the same job. An ExternalStore whose tables are called ``<module>.<table>``: ranks
        have different ids, or different tables.
    """
    if isinstance(storage, ExternalStore):
        if not module:
            return storage
        return ExternalStore(StoreOfModule(storage.store, module), storage.cache)
    parts = [_file_name([module])] if module else []
    return storage.within(str(Path(*parts, _file_name(tables), f"rank{rank}of{ranks}")))


def _file_name(names: Sequence[str]) -> str:
    """Names as that of one file, different for other names."""
    safe = "+".join(quote(name, safe="") for name in names)
    if safe.startswith("."):
        safe = f"%2E{safe[1:]}"
    if len(safe) <= _LONGEST_NAME:
        return safe
    return f"{safe[:_LONGEST_NAME]}.{hashlib.sha256(safe.encode()).hexdigest()[:16]}"


__all__ = ["StoreOfModule", "part_of_storage"]
