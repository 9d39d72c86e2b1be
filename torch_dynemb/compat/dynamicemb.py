"""Names of NVIDIA's DynamicEmb, in one module.

Imports ``from torch_dynemb.compat.dynamicemb import ...`` replace those from ``dynamicemb``,
``dynamicemb.planner`` and ``dynamicemb.shard``. Options that are not built raise an error.
"""

from fbgemm_gpu.split_embedding_configs import EmbOptimType

from torch_dynemb.migrate.dynamicemb_calls import DynamicEmbDump, DynamicEmbLoad
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
)
from torch_dynemb.torchrec.dynamicemb.increments import incremental_dump
from torch_dynemb.torchrec.dynamicemb.options import (
    DynamicEmbCheckMode,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbParameterConstraints,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
    get_table_value_bytes,
)

__all__ = [
    "DynamicEmbCheckMode",
    "DynamicEmbDump",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbLoad",
    "DynamicEmbParameterConstraints",
    "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions",
    "DynamicEmbeddingBagCollectionSharder",
    "DynamicEmbeddingCollectionSharder",
    "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
    "EmbOptimType",
    "FrequencyAdmissionStrategy",
    "KVCounter",
    "get_table_value_bytes",
    "incremental_dump",
]
