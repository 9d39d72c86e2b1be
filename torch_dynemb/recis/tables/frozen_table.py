"""Read-only copies of hash tables."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb.distributed.ranks import process_group_of
from torch_dynemb.nn.inputs import flat_ids
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.recis.tables.hash_table import HashTable
from torch_dynemb.recis.tables.packed_rows import unpack_rows
from torch_dynemb.serving import Choices, FrozenModule, freezes
from torch_dynemb.serving.gathering import whole_group
from torch_dynemb.table.group import TableGroup


class FrozenHashTable(FrozenModule):
    """Read-only copy of a :class:`HashTable`.

    Args:
        source: the table.
        group: its rows, or those of all ranks that share it.
    """

    def __init__(self, source: HashTable, group: TableGroup) -> None:
        super().__init__(group, torch.float32)
        self.embedding_dim = source.embedding_dim
        self.packed = source.packed
        if self.packed:
            self.frozen_tables.kept_because = (
                f"the rows of HashTable {source.name!r} are int8 already: freeze with rows=None"
            )
        self.name = source.name
        self._columns = source.group.config.tables[0].embedding_dim

    @property
    def children_hashtable(self) -> list[str]:
        """Names of the children."""
        return self.frozen_tables.names

    def forward(self, ids: Tensor, *, child: str | None = None) -> Tensor:
        """As :meth:`HashTable.forward` in eval mode.

        Args:
            ids: int64 or int32 of any shape.
            child: which logical table; needed where there are several.

        Returns:
            float32, or what :meth:`to` has made of it; the shape of ids + (dim,).

        Raises:
            TypeError: ids are not integers.
            ValueError: no such child.
        """
        names = self.children_hashtable
        if (child is None and len(names) > 1) or (child is not None and child not in names):
            raise ValueError(
                f"FrozenHashTable {self.name!r}: child is {child!r}, expected one of {names}"
            )
        flat = flat_ids("FrozenHashTable", ids)
        number = 0 if child is None else names.index(child)
        rows = self.lookup(flat, self.frozen_tables.one_bag, children=[number])
        if self.packed:
            rows = unpack_rows(rows, self.embedding_dim, torch.float32)
        return rows.to(self.output_dtype).reshape(*ids.shape, self.embedding_dim)

    def lookup(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        *,
        children: list[int],
        pooling: Pooling = Pooling.NONE,
    ) -> Tensor:
        """As :meth:`HashTable.lookup` in eval mode.

        Args:
            ids: int64 [N], feature after feature.
            offsets: int64 [F * B + 1], where bags begin: B of every feature.
            weights: float32 [N], factors of the rows, or None.
            children: number of the child of every feature.
            pooling: how the rows of a bag become one; NONE: they do not.

        Returns:
            float32 [N, columns] without pooling, else [B, F * columns].
        """
        return self._float_lookup(
            ids,
            offsets,
            weights,
            feature_tables=children,
            feature_dims=[self._columns] * len(children),
            pooling=pooling,
        )


@freezes(HashTable)
def frozen_hash_table(source: HashTable, choices: Choices) -> FrozenHashTable | None:
    """The read-only copy of a hash table; None on a rank that gets none.

    Args:
        source: the table.
        choices: of :func:`torch_dynemb.freeze`.
    """
    group = whole_group(
        f"freeze: HashTable {source.name!r}",
        source.group,
        process_group_of(source.rank_group),
        choices.ranks,
    )
    return None if group is None else FrozenHashTable(source, group)


__all__ = ["FrozenHashTable", "frozen_hash_table"]
