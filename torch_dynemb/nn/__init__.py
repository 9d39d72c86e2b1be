"""Modules: dynamic tables with the signatures of ``nn.Embedding`` and ``nn.EmbeddingBag``."""

from torch_dynemb.nn.averaged_models import average_tables_too
from torch_dynemb.nn.bag import DynamicEmbeddingBag
from torch_dynemb.nn.collection import DynamicEmbeddingBagCollection, DynamicEmbeddingCollection
from torch_dynemb.nn.embedding import DynamicEmbedding
from torch_dynemb.nn.features import KeyedJagged
from torch_dynemb.nn.prefetching import prefetched

average_tables_too()

__all__ = [
    "DynamicEmbedding",
    "DynamicEmbeddingBag",
    "DynamicEmbeddingBagCollection",
    "DynamicEmbeddingCollection",
    "KeyedJagged",
    "prefetched",
]
