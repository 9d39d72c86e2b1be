"""Sharders and sharded collections, as in ``dynamicemb.shard``."""

from torch_dynemb.compat.dynamicemb.not_offered import refusing
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
)
from torch_dynemb.torchrec.collections.bag import ShardedDynamicEmbeddingBagCollection
from torch_dynemb.torchrec.collections.sequence import ShardedDynamicEmbeddingCollection

__getattr__ = refusing(__name__)

__all__ = [
    "DynamicEmbeddingBagCollectionSharder",
    "DynamicEmbeddingCollectionSharder",
    "ShardedDynamicEmbeddingBagCollection",
    "ShardedDynamicEmbeddingCollection",
]
