"""torch_dynemb: embedding tables without a vocabulary for PyTorch."""

from torch_dynemb import checkpoint, errors
from torch_dynemb._moved_modules import resolve_moved_modules
from torch_dynemb._version import __version__ as __version__
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
    prefetched,
    private_to_rank,
)
from torch_dynemb.optim import (
    LAMB,
    LARSSGD,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    AdamWTF,
    AMSGrad,
    Ftrl,
    FusedOptimizer,
    GroupFtrl,
    MomentumSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
    SmartDecayAdam,
    SplitOptimizer,
    clip_grad_norm_,
    table_optimizers,
)
from torch_dynemb.policy.admission import (
    AdmitBy,
    AdmitByChance,
    AdmitFrequent,
    AdmitFrequentSketch,
    AdmitNone,
    NewIds,
    register_admission,
)
from torch_dynemb.policy.policy import FeaturePolicy, Policy
from torch_dynemb.serving import freeze
from torch_dynemb.storage.tiers import ExternalStore, SSDStore, StorageStats
from torch_dynemb.table.group import TableConfig, TableGroup
from torch_dynemb.table.host_state import EvictedIds
from torch_dynemb.table.stats import TableStats

resolve_moved_modules(__name__)

__all__ = [
    "LAMB",
    "LARSSGD",
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
    "ExternalStore",
    "FeaturePolicy",
    "Ftrl",
    "FusedOptimizer",
    "GroupFtrl",
    "Initializer",
    "KaimingNormal",
    "KaimingUniform",
    "KeyedJagged",
    "MomentumSGD",
    "NewIds",
    "Normal",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "Policy",
    "RowWiseAdagrad",
    "SSDStore",
    "SmartDecayAdam",
    "SplitOptimizer",
    "StorageStats",
    "TableConfig",
    "TableGroup",
    "TableStats",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
    "checkpoint",
    "clip_grad_norm_",
    "errors",
    "freeze",
    "prefetched",
    "private_to_rank",
    "register_admission",
    "table_optimizers",
]
