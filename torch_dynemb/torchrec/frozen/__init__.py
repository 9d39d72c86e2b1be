"""Read-only copies of sharded models, whole in one process."""

from torch_dynemb.torchrec.frozen.copies import frozen_collection
from torch_dynemb.torchrec.frozen.modules import (
    FrozenEmbeddingBagCollection,
    FrozenEmbeddingCollection,
)

__all__ = ["FrozenEmbeddingBagCollection", "FrozenEmbeddingCollection", "frozen_collection"]
