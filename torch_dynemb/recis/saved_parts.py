"""What checkpoints save of RecIS's modules: the logical tables, and which ids a rank has of them.

A logical table is named after the module that was made with options, an engine or an embedding, and
its child: not after the physical table, whose name depends on options and on the process group.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch_dynemb.checkpoint import IdSlots, TablePart, table_name, tables_of
from torch_dynemb.recis.embedding import DynamicEmbedding, EmbeddingEngine
from torch_dynemb.recis.tables import HashTable


@tables_of(HashTable)
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


@tables_of(DynamicEmbedding)
def _in_embedding(embedding: DynamicEmbedding, path: str) -> Iterator[TablePart]:
    yield from _in_hash_table(embedding.hashtable, path)


@tables_of(EmbeddingEngine)
def _in_engine(engine: EmbeddingEngine, path: str) -> Iterator[TablePart]:
    for table in engine.tables.values():
        assert isinstance(table, HashTable)
        yield from _in_hash_table(table, path)


__all__: list[str] = []
