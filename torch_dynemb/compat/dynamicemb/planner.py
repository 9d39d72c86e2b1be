"""Planner, enumerator and constraints, as in ``dynamicemb.planner``."""

from torch_dynemb.compat.dynamicemb.not_offered import refusing
from torch_dynemb.torchrec import DynamicEmbeddingEnumerator, DynamicEmbeddingShardingPlanner
from torch_dynemb.torchrec.dynamicemb.options import DynamicEmbParameterConstraints

__getattr__ = refusing(__name__)

__all__ = [
    "DynamicEmbParameterConstraints",
    "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
]
