"""In which order sharded collections return their outputs."""

from __future__ import annotations

from collections.abc import Sequence

from jagged_batches import batches_of_ranks, keyed_jagged
from sharded_models import Table, sharded


def output_keys(rank: int, tables: Sequence[Table]) -> list[str]:
    """Keys of what the EmbeddingBagCollection, or else the EmbeddingCollection, returns."""
    model = sharded(tables)
    features = list(dict.fromkeys(feature for table in tables for feature in table.features))
    batch = batches_of_ranks("plain", features, 2, 0, vocabulary=5)[rank]
    collection = getattr(model.module, "bags", None) or model.module.sequences
    return list(collection(keyed_jagged(batch, "plain")).keys())
