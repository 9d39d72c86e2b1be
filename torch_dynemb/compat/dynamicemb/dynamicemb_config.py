"""Options and sizes of a table, as in ``dynamicemb.dynamicemb_config``."""

from torchrec.modules.embedding_configs import data_type_to_dtype

from torch_dynemb.compat.dynamicemb.not_offered import refusing
from torch_dynemb.torchrec.dynamicemb.options import (
    DynamicEmbCheckMode,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EvictedItemMode,
)
from torch_dynemb.torchrec.dynamicemb.sizes import (
    BUCKET_ALIGNMENT,
    MAX_BUCKET_CAPACITY,
    align_to_table_size,
    get_optimizer_state_dim,
    get_sharded_table_capacity,
    get_table_value_bytes,
)

__getattr__ = refusing(__name__)

__all__ = [
    "BUCKET_ALIGNMENT",
    "MAX_BUCKET_CAPACITY",
    "DynamicEmbCheckMode",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions",
    "EvictedItemMode",
    "align_to_table_size",
    "data_type_to_dtype",
    "get_optimizer_state_dim",
    "get_sharded_table_capacity",
    "get_table_value_bytes",
]
