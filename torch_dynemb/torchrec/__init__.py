"""Dynamic tables through TorchRec's DistributedModelParallel."""

from torch_dynemb.torchrec import registration as _registration  # noqa: F401 - registers modules
from torch_dynemb.torchrec.frozen import FrozenEmbeddingBagCollection, FrozenEmbeddingCollection
from torch_dynemb.torchrec.new_plan import reshard
from torch_dynemb.torchrec.pipelines import PrefetchTrainPipeline
from torch_dynemb.torchrec.planning.estimators import DynamicPerfEstimator, DynamicStorageEstimator
from torch_dynemb.torchrec.planning.options import DynamicTableConstraints, TableOptions
from torch_dynemb.torchrec.planning.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    collective_plan,
    dynamic_enumerator,
)
from torch_dynemb.torchrec.quantization import quantization_mapping
from torch_dynemb.torchrec.replicas.dmp_collection import DynamicDMPCollection
from torch_dynemb.torchrec.sharders import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
)
from torch_dynemb.torchrec.state.inspect import local_shards, table_sizes
from torch_dynemb.torchrec.state.load_planner import LoadPlanner
from torch_dynemb.torchrec.state.stager import Stager
from torch_dynemb.torchrec.whole_tables import table_rows

__all__ = [
    "DynamicDMPCollection",
    "DynamicEmbeddingBagCollectionSharder",
    "DynamicEmbeddingCollectionSharder",
    "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
    "DynamicPerfEstimator",
    "DynamicStorageEstimator",
    "DynamicTableConstraints",
    "FrozenEmbeddingBagCollection",
    "FrozenEmbeddingCollection",
    "LoadPlanner",
    "PrefetchTrainPipeline",
    "Stager",
    "TableOptions",
    "collective_plan",
    "dynamic_enumerator",
    "local_shards",
    "quantization_mapping",
    "reshard",
    "table_rows",
    "table_sizes",
]
