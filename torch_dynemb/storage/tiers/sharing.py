"""Division of one storage among several groups or ranks."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from torch import Tensor

from torch_dynemb.storage.tiers.configs import ExternalStore, Storage
from torch_dynemb.storage.tiers.host_store import HostStore
from torch_dynemb.storage.tiers.protocol import RecordStore

# File systems allow 255 bytes: longer names are cut, and a hash keeps them distinct.
_LONGEST_NAME = 100


@dataclass(frozen=True)
class StoreOfModule:
    """The tables of one module in a store that other modules use as well.

    Args:
        store: of all modules.
        module: prefix of the names of its tables: ``<module>.<table>``.
    """

    store: RecordStore
    module: str

    def name(self, table: str) -> str:
        """Return the name of a table in the store.

        Args:
            table: its name in the module.
        """
        return f"{self.module}.{table}"

    def read(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        """Read records as :meth:`RecordStore.read`."""
        return self.store.read(self.name(table), ids, out)

    def write(self, table: str, ids: Tensor, records: Tensor) -> object:
        """Write records as :meth:`RecordStore.write`."""
        return self.store.write(self.name(table), ids, records)

    def erase(self, table: str, ids: Tensor) -> object:
        """Erase records as :meth:`RecordStore.erase`."""
        return self.store.erase(self.name(table), ids)


def part_of_storage(
    storage: Storage, module: str, tables: Sequence[str], *, rank: int, ranks: int
) -> Storage:
    """Return a group's part of a storage that other groups and ranks use, too.

    Args:
        storage: of all of them.
        module: name of the group's module; empty: names of tables are unique without it.
        tables: names of the group's tables; within a module and rank, a table is in one group only.
        rank, ranks: the group's rank, and the number of ranks.

    Returns:
        An SSDStore in the directory ``<path>/<module>/<tables>/rank<r>of<n>``, the same in every
        run of the same job. Or an ExternalStore with tables called ``<module>.<table>``: ranks have
        different ids, or different tables. A HostStore as it is: its budgets are for one group.
    """
    if isinstance(storage, HostStore):
        return storage
    if isinstance(storage, ExternalStore):
        if not module:
            return storage
        return dataclasses.replace(storage, store=StoreOfModule(storage.store, module))
    parts = [_file_name([module])] if module else []
    return storage.within(str(Path(*parts, _file_name(tables), f"rank{rank}of{ranks}")))


def _file_name(names: Sequence[str]) -> str:
    """Encode names as one file name, distinct for distinct names."""
    safe = "+".join(quote(name, safe="") for name in names)
    if safe.startswith("."):
        safe = f"%2E{safe[1:]}"
    if len(safe) <= _LONGEST_NAME:
        return safe
    return f"{safe[:_LONGEST_NAME]}.{hashlib.sha256(safe.encode()).hexdigest()[:16]}"


__all__ = ["StoreOfModule", "part_of_storage"]
