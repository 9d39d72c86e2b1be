"""Dynamic tables through TorchRec's DistributedModelParallel."""

from torch_dynemb.torchrec.estimators import DynamicPerfEstimator, DynamicStorageEstimator
from torch_dynemb.torchrec.inspection import LocalShard, local_shards, table_sizes
from torch_dynemb.torchrec.load_planner import LoadPlanner
from torch_dynemb.torchrec.options import DynamicTableConstraints, TableOptions
from torch_dynemb.torchrec.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    collective_plan,
    dynamic_enumerator,
)
from torch_dynemb.torchrec.sharders import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
)

__all__ = [
    "DynamicEmbeddingBagCollectionSharder",
    "DynamicEmbeddingCollectionSharder",
    "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
    "DynamicPerfEstimator",
    "DynamicStorageEstimator",
    "DynamicTableConstraints",
    "LoadPlanner",
    "LocalShard",
    "TableOptions",
    "collective_plan",
    "dynamic_enumerator",
    "local_shards",
    "table_sizes",
]
