"""Read-only copies of OneEmbedding's modules."""

from __future__ import annotations

from torch import Tensor

from torch_dynemb.distributed.ranks import process_group_of
from torch_dynemb.oneembedding.embedding import Embedding
from torch_dynemb.oneembedding.ids_by_table import keys_by_table
from torch_dynemb.serving import Choices, FrozenModule
from torch_dynemb.serving.gathering import whole_group
from torch_dynemb.table import TableGroup


class FrozenMultiTableEmbedding(FrozenModule):
    """Read-only copy of a :class:`MultiTableEmbedding` or :class:`MultiTableMultiColumnEmbedding`.

    Args:
        source: the embedding.
        group: rows of the embedding, gathered from all ranks that share it.
    """

    def __init__(self, source: Embedding, group: TableGroup) -> None:
        super().__init__(group, source.dtype)
        self.key_type = source.key_type
        self.embedding_dim, self.column_dims = source.embedding_dim, list(source.column_dims)
        self.num_tables = source.num_tables

    def forward(self, ids: Tensor, table_ids: Tensor | None = None) -> Tensor:
        """Look up rows as the embedding's forward does in eval mode.

        Args:
            ids: of the embedding's key type. Shape (batch, tables): column t has the ids of table
                t. Any shape if ``table_ids`` is given or if there is one table.
            table_ids: integers of the shape of ``ids``: the table number of each id.

        Returns:
            Rows of the embedding's dtype, of shape ``ids.shape`` + (sum of the dims,).

        Raises:
            TypeError: a dtype does not match.
            ValueError: shapes do not match, or the table does not exist.
        """
        given = keys_by_table(type(self).__name__, ids, table_ids, self.key_type, self.num_tables)
        rows = self.frozen_tables.lookup(given.batch(self.embedding_dim))
        return given.in_order(rows, ids.shape).to(self.output_dtype)


def frozen_multi_table_embedding(
    source: Embedding, choices: Choices
) -> FrozenMultiTableEmbedding | None:
    group = whole_group(
        f"freeze: {type(source).__name__} {source.name!r}",
        source.group,
        process_group_of(source.rank_group),
        choices,
    )
    return None if group is None else FrozenMultiTableEmbedding(source, group)


__all__ = ["FrozenMultiTableEmbedding"]
