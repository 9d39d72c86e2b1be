"""Sharded collections with dynamic and static tables in them."""

from torch_dynemb.torchrec.collections.bag import ShardedDynamicEmbeddingBagCollection
from torch_dynemb.torchrec.collections.sequence import ShardedDynamicEmbeddingCollection

__all__ = ["ShardedDynamicEmbeddingBagCollection", "ShardedDynamicEmbeddingCollection"]
