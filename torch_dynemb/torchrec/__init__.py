"""Dynamic tables through TorchRec's DistributedModelParallel."""

from torch_dynemb.torchrec.load_planner import LoadPlanner
from torch_dynemb.torchrec.options import DynamicTableConstraints, TableOptions
from torch_dynemb.torchrec.sharders import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
)

__all__ = [
    "DynamicEmbeddingBagCollectionSharder",
    "DynamicEmbeddingCollectionSharder",
    "DynamicTableConstraints",
    "LoadPlanner",
    "TableOptions",
]
