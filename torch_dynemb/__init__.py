"""torch_dynemb: embedding tables without a vocabulary for PyTorch."""

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
from torch_dynemb.life_cycle import TableStats
from torch_dynemb.nn import (
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    KeyedJagged,
)
from torch_dynemb.optim import SGD, Adagrad, Adam, AdamW, FusedOptimizer, RowWiseAdagrad
from torch_dynemb.table import TableConfig, TableGroup

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ByColumn",
    "Constant",
    "DynamicEmbedding",
    "DynamicEmbeddingBag",
    "DynamicEmbeddingBagCollection",
    "DynamicEmbeddingCollection",
    "FusedOptimizer",
    "Initializer",
    "KaimingNormal",
    "KaimingUniform",
    "KeyedJagged",
    "Normal",
    "RowWiseAdagrad",
    "TableConfig",
    "TableGroup",
    "TableStats",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
    "freeze",
]
