"""Embeddings of features: their options, and the lookups that many features share."""

from torch_dynemb.recis.embedding.dynamic_embedding import DynamicEmbedding
from torch_dynemb.recis.embedding.embedding_engine import EmbeddingEngine
from torch_dynemb.recis.embedding.frozen import FrozenDynamicEmbedding, FrozenEmbeddingEngine
from torch_dynemb.recis.embedding.options import EmbeddingOption
from torch_dynemb.recis.embedding.unreduced import NoReduceEmbedding

__all__ = [
    "DynamicEmbedding",
    "EmbeddingEngine",
    "EmbeddingOption",
    "FrozenDynamicEmbedding",
    "FrozenEmbeddingEngine",
    "NoReduceEmbedding",
]
