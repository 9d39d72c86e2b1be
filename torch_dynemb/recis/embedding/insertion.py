"""Rows of ids that users insert, on the ranks that own them."""

from __future__ import annotations

from torch import Tensor

from torch_dynemb.distributed.ranks import process_group_of
from torch_dynemb.nn.id_exchange import insert_at_owners
from torch_dynemb.recis.tables.hash_table import HashTable
from torch_dynemb.recis.tables.insertion import rows_to_store
from torch_dynemb.table import RowBatch


def insert_rows(
    owner: str, table: HashTable, child: str | None, input_ids: Tensor, input_emb: Tensor
) -> None:
    """Set rows of ids of any rank, as :meth:`DynamicEmbedding.insert` does; all ranks call it.

    Args:
        owner: function, with which errors begin.
        table: of this rank.
        child: name of its logical table; None: the only one.
        input_ids: int64 or int32 of any shape, n in all.
        input_emb: float [n, dim].

    Raises:
        Exception: of one rank, on all of them; then no rank has changed.
    """

    def checked() -> tuple[int, RowBatch]:
        table._check_stored("insert")
        group, dim, packed = table.group, table.embedding_dim, table.packed
        given = rows_to_store(owner, "input_emb", input_ids, input_emb, group, dim, packed=packed)
        return table._table(child), given

    if table.rank_group is not None and process_group_of(table.rank_group) is not None:
        insert_at_owners(owner, table, table.rank_group, checked)
        return
    number, batch = checked()
    table.group.insert_or_assign(number, batch.ids, batch.rows)


__all__ = ["insert_rows"]
