"""Dynamic tables through TorchRec's DistributedModelParallel."""

from torch_dynemb.torchrec.estimators import DynamicPerfEstimator, DynamicStorageEstimator
from torch_dynemb.torchrec.options import DynamicTableConstraints, TableOptions
from torch_dynemb.torchrec.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    collective_plan,
    dynamic_enumerator,
)

__all__ = [
    "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
    "DynamicPerfEstimator",
    "DynamicStorageEstimator",
    "DynamicTableConstraints",
    "TableOptions",
    "collective_plan",
    "dynamic_enumerator",
]
