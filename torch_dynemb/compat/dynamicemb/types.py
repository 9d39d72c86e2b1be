"""Initializers and limits, as in ``dynamicemb.types``."""

from torch_dynemb.compat.dynamicemb.not_offered import refusing
from torch_dynemb.torchrec.dynamicemb.options import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
)
from torch_dynemb.torchrec.dynamicemb.sizes import BUCKET_ALIGNMENT, MAX_BUCKET_CAPACITY

__getattr__ = refusing(__name__)

__all__ = [
    "BUCKET_ALIGNMENT",
    "MAX_BUCKET_CAPACITY",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
]
