"""Read-only copies of hash tables."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb.distributed.ranks import process_group_of
from torch_dynemb.nn.inputs import flat_ids
from torch_dynemb.ops import LookupBatch
from torch_dynemb.recis.tables.hash_table import HashTable
from torch_dynemb.recis.tables.packed_rows import unpack_int8
from torch_dynemb.serving import Choices, FrozenModule
from torch_dynemb.serving.gathering import whole_group
from torch_dynemb.table import TableGroup


class FrozenHashTable(FrozenModule):
    """Read-only copy of a :class:`HashTable`.

    Args:
        source: the table.
        group: rows of the table, or of all ranks that share it.
    """

    def __init__(self, source: HashTable, group: TableGroup) -> None:
        packed = f"the rows of {source.children_hashtable} are int8 already: freeze with rows=None"
        super().__init__(group, torch.float32, packed if source.packed else None)
        self.embedding_dim = source.embedding_dim
        self.packed = source.packed
        self.name = source.name
        self.columns = source.group.config.tables[0].embedding_dim

    @property
    def children_hashtable(self) -> list[str]:
        """Names of the children."""
        return self.frozen_tables.names

    def forward(self, ids: Tensor, *, child: str | None = None) -> Tensor:
        """Look ids up as :meth:`HashTable.forward` does in eval mode.

        Args:
            ids: int64 or int32 of any shape.
            child: name of the logical table; required if there are several.

        Returns:
            float32, or the dtype set by :meth:`to`; the shape of ids + (dim,).

        Raises:
            TypeError: ids are not integers.
            ValueError: unknown child.
        """
        names = self.children_hashtable
        if (child is None and len(names) > 1) or (child is not None and child not in names):
            raise ValueError(
                f"FrozenHashTable {self.name!r}: child is {child!r}, expected one of {names}"
            )
        flat = flat_ids("FrozenHashTable", ids)
        number = 0 if child is None else names.index(child)
        one_bag = self.frozen_tables.one_bag
        rows = self.lookup(LookupBatch.of_rows(flat, one_bag, [number], self.columns))
        if self.packed:
            rows = unpack_int8(rows, self.embedding_dim, torch.float32)
        return rows.to(self.output_dtype).reshape(*ids.shape, self.embedding_dim)

    def lookup(self, batch: LookupBatch) -> Tensor:
        """Look a batch up as :meth:`HashTable.lookup` does in eval mode.

        Args:
            batch: the lookup, in the tables of the children.

        Returns:
            float32 [N, columns] without pooling, else [B, F * columns].
        """
        return self.frozen_tables.lookup(batch)


def frozen_hash_table(source: HashTable, choices: Choices) -> FrozenHashTable | None:
    """Return the read-only copy of a hash table; None on a rank that gets none.

    Args:
        source: the table.
        choices: of :func:`torch_dynemb.freeze`.
    """
    group = whole_group(
        f"freeze: {source.children_hashtable}",
        source.group,
        process_group_of(source.rank_group),
        choices,
    )
    return None if group is None else FrozenHashTable(source, group)


__all__ = ["FrozenHashTable", "frozen_hash_table"]
