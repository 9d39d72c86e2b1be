"""Names and modules of NVIDIA's DynamicEmb.

Imports from ``torch_dynemb.compat.dynamicemb`` replace those from ``dynamicemb``. After
:func:`register_as_dynamicemb`, programs import ``dynamicemb`` and its modules unchanged. Options
that are not built raise an error, and so do names of DynamicEmb that are not offered: each says
what to use instead.
"""

from torch_dynemb.compat.dynamicemb.dump_load import DynamicEmbDump, DynamicEmbLoad
from torch_dynemb.compat.dynamicemb.dynamicemb_config import (
    BUCKET_ALIGNMENT,
    MAX_BUCKET_CAPACITY,
    DynamicEmbCheckMode,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EvictedItemMode,
    align_to_table_size,
    data_type_to_dtype,
    get_sharded_table_capacity,
    get_table_value_bytes,
)
from torch_dynemb.compat.dynamicemb.embedding_admission import (
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilisticAdmissionStrategy,
)
from torch_dynemb.compat.dynamicemb.incremental_dump import pop_evicted_keys
from torch_dynemb.compat.dynamicemb.not_offered import refusing
from torch_dynemb.compat.dynamicemb.optimizer import DynamicEmbOptimType, EmbOptimType
from torch_dynemb.compat.dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
)
from torch_dynemb.compat.dynamicemb.registration import register_as_dynamicemb
from torch_dynemb.compat.dynamicemb.shard import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
)

__getattr__ = refusing(__name__)

__all__ = [
    "BUCKET_ALIGNMENT",
    "MAX_BUCKET_CAPACITY",
    "DynamicEmbCheckMode",
    "DynamicEmbDump",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbLoad",
    "DynamicEmbOptimType",
    "DynamicEmbParameterConstraints",
    "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions",
    "DynamicEmbeddingBagCollectionSharder",
    "DynamicEmbeddingCollectionSharder",
    "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
    "EmbOptimType",
    "EvictedItemMode",
    "FrequencyAdmissionStrategy",
    "KVCounter",
    "ProbabilisticAdmissionStrategy",
    "align_to_table_size",
    "data_type_to_dtype",
    "get_sharded_table_capacity",
    "get_table_value_bytes",
    "pop_evicted_keys",
    "register_as_dynamicemb",
]
