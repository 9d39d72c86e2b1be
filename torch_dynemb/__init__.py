"""torch_dynemb: embedding tables without a vocabulary for PyTorch."""

from torch_dynemb.admission import (
    AdmitBy,
    AdmitByChance,
    AdmitFrequent,
    AdmitFrequentSketch,
    AdmitNone,
    NewIds,
    register_admission,
)
from torch_dynemb.evictions import EvictedIds
from torch_dynemb.freeze import freeze
from torch_dynemb.initializers import (
    ByColumn,
    Constant,
    Initializer,
    KaimingNormal,
    KaimingUniform,
    Normal,
    TruncatedNormal,
    Uniform,
    XavierNormal,
    XavierUniform,
)
from torch_dynemb.nn import (
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    KeyedJagged,
)
from torch_dynemb.optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    AdamWTF,
    AMSGrad,
    FusedOptimizer,
    MomentumSGD,
    RowWiseAdagrad,
)
from torch_dynemb.policy import FeaturePolicy, Policy
from torch_dynemb.table import TableConfig, TableGroup
from torch_dynemb.table_stats import TableStats

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AMSGrad",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamWTF",
    "AdmitBy",
    "AdmitByChance",
    "AdmitFrequent",
    "AdmitFrequentSketch",
    "AdmitNone",
    "ByColumn",
    "Constant",
    "DynamicEmbedding",
    "DynamicEmbeddingBag",
    "DynamicEmbeddingBagCollection",
    "DynamicEmbeddingCollection",
    "EvictedIds",
    "FeaturePolicy",
    "FusedOptimizer",
    "Initializer",
    "KaimingNormal",
    "KaimingUniform",
    "KeyedJagged",
    "MomentumSGD",
    "NewIds",
    "Normal",
    "Policy",
    "RowWiseAdagrad",
    "TableConfig",
    "TableGroup",
    "TableStats",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
    "freeze",
    "register_admission",
]
