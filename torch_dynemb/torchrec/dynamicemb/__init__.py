"""DynamicEmb's table options; :mod:`torch_dynemb.compat.dynamicemb` has all of its names."""

from torch_dynemb.torchrec.dynamicemb.options import (
    DynamicEmbCheckMode,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbParameterConstraints,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EvictedItemMode,
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilisticAdmissionStrategy,
)
from torch_dynemb.torchrec.dynamicemb.sizes import (
    get_sharded_table_capacity,
    get_table_value_bytes,
)

__all__ = [
    "DynamicEmbCheckMode",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbParameterConstraints",
    "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions",
    "EvictedItemMode",
    "FrequencyAdmissionStrategy",
    "KVCounter",
    "ProbabilisticAdmissionStrategy",
    "get_sharded_table_capacity",
    "get_table_value_bytes",
]
