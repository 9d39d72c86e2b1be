"""Registration of embeddings: their tables with the ids of a rank, and their frozen copies."""

from __future__ import annotations

from collections.abc import Iterator

from torch_dynemb.checkpoint import IdSlots, TablePart, table_name
from torch_dynemb.nn import register_module
from torch_dynemb.oneembedding.embedding import Embedding
from torch_dynemb.oneembedding.frozen import frozen_multi_table_embedding
from torch_dynemb.oneembedding.snapshots import table_entry


def _in_embedding(embedding: Embedding, path: str) -> Iterator[TablePart]:
    slots = embedding.own_slots
    ids = IdSlots()
    if embedding.world_size > 1:
        ids = IdSlots(slots.start, slots.stop, embedding.id_slots)
    for number, config in enumerate(embedding.group.config.tables):
        yield TablePart(
            table_name(path, table_entry(number)),
            embedding.group,
            number,
            config.embedding_dim,
            ids=ids,
            trained=embedding.trained,
        )


register_module(Embedding, tables=_in_embedding, frozen=frozen_multi_table_embedding)

__all__: list[str] = []
