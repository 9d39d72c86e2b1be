"""Registration of RecIS's modules: logical tables with the ids of a rank, and copies.

The name of a logical table is the path of its engine or embedding, and the name of its child. The
name of the physical table is not used, because it depends on options and on the process group.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch_dynemb.checkpoint import IdSlots, TablePart, table_name
from torch_dynemb.nn import register_module
from torch_dynemb.recis.embedding import DynamicEmbedding, EmbeddingEngine
from torch_dynemb.recis.embedding.frozen import frozen_dynamic_embedding, frozen_engine
from torch_dynemb.recis.tables import HashTable
from torch_dynemb.recis.tables.frozen_table import frozen_hash_table


def _in_hash_table(table: HashTable, path: str) -> Iterator[TablePart]:
    ids = IdSlots() if table.slice.whole else IdSlots(*table.slice)
    for number, child in enumerate(table.children_hashtable):
        config = table.group.config.tables[number]
        yield TablePart(
            table_name(path, child),
            table.group,
            number,
            config.embedding_dim,
            ids=ids,
            packed=table.packed,
            trained=table.trained,
        )


def _in_embedding(embedding: DynamicEmbedding, path: str) -> Iterator[TablePart]:
    yield from _in_hash_table(embedding.hashtable, path)


def _in_engine(engine: EmbeddingEngine, path: str) -> Iterator[TablePart]:
    for table in engine.tables.values():
        assert isinstance(table, HashTable)
        yield from _in_hash_table(table, path)


register_module(HashTable, tables=_in_hash_table, frozen=frozen_hash_table)
register_module(DynamicEmbedding, tables=_in_embedding, frozen=frozen_dynamic_embedding)
register_module(EmbeddingEngine, tables=_in_engine, frozen=frozen_engine)

__all__: list[str] = []
