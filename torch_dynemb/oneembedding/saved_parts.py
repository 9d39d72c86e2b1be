"""What checkpoints save of embeddings: their tables, and which ids a rank has of them."""

from __future__ import annotations

from collections.abc import Iterator

from torch_dynemb.checkpoint import IdSlots, TablePart, table_name, tables_of
from torch_dynemb.oneembedding.embedding import Embedding
from torch_dynemb.oneembedding.snapshots import table_entry


@tables_of(Embedding)
def _in_embedding(embedding: Embedding, path: str) -> Iterator[TablePart]:
    own = embedding.own_slots
    ids = IdSlots()
    if embedding.world_size > 1:
        ids = IdSlots(own.start, own.stop, embedding.id_slots)
    for number, config in enumerate(embedding.group.config.tables):
        yield TablePart(
            table_name(path, table_entry(number)),
            embedding.group,
            number,
            config.embedding_dim,
            ids=ids,
            trained=embedding.trained,
        )


__all__: list[str] = []
