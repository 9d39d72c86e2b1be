"""torch_dynemb: embedding tables without a vocabulary for PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

from torch_dynemb import checkpoint, delta_log, errors
from torch_dynemb import nn as nn
from torch_dynemb import ops as ops
from torch_dynemb import optim as optim
from torch_dynemb import policy as policy
from torch_dynemb import retrieval as retrieval
from torch_dynemb import serving as serving
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
    ModuleOptions,
    ReplacementReport,
    SingleTableOptions,
    StepWith,
    clip_grad_norm_,
    prefetched,
    private_to_rank,
    register_module,
    replace_embeddings,
    restore_torch,
    step_with,
    table_optimizers,
)
from torch_dynemb.ops.string_ids import hash_strings
from torch_dynemb.optim import (
    LAMB,
    LARSSGD,
    SGD,
    Adadelta,
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
    RMSprop,
    RowWiseAdagrad,
    RowWiseRMSprop,
    SmartDecayAdam,
    SplitOptimizer,
)
from torch_dynemb.parts.new_ids import insert_new
from torch_dynemb.policy.admission import (
    AdmitBy,
    AdmitByChance,
    AdmitFrequent,
    AdmitFrequentSketch,
    AdmitNone,
    NewIds,
    register_admission,
)
from torch_dynemb.policy.custom import Custom
from torch_dynemb.policy.keep import AtLeast, Top
from torch_dynemb.policy.policy import FeaturePolicy, Policy
from torch_dynemb.retrieval import (
    FrequencyNegatives,
    FullSoftmaxLoss,
    IdNames,
    InBatchNegatives,
    SampledSoftmaxLoss,
    UniformNegatives,
    export_vectors,
    in_batch_softmax_loss,
    top_k,
)
from torch_dynemb.serving import freeze
from torch_dynemb.storage.tiers import ExternalStore, HostStore, SSDStore, StorageStats
from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.host_state import EvictedIds
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.stats import TableStats

if TYPE_CHECKING:
    from torch_dynemb import migrate as migrate
    from torch_dynemb import oneembedding as oneembedding
    from torch_dynemb import recis as recis
    from torch_dynemb import torchrec as torchrec

_PACKAGES = ("nn", "ops", "optim", "policy", "retrieval", "serving")
_WITH_MORE_PACKAGES = ("migrate", "oneembedding", "recis", "torchrec")

__all__ = [
    "LAMB",
    "LARSSGD",
    "SGD",
    "AMSGrad",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamWTF",
    "AdmitBy",
    "AdmitByChance",
    "AdmitFrequent",
    "AdmitFrequentSketch",
    "AdmitNone",
    "AtLeast",
    "ByColumn",
    "Constant",
    "Custom",
    "DynamicEmbedding",
    "DynamicEmbeddingBag",
    "DynamicEmbeddingBagCollection",
    "DynamicEmbeddingCollection",
    "EvictedIds",
    "ExternalStore",
    "FeaturePolicy",
    "FrequencyNegatives",
    "Ftrl",
    "FullSoftmaxLoss",
    "FusedOptimizer",
    "GroupFtrl",
    "HostStore",
    "IdNames",
    "InBatchNegatives",
    "Initializer",
    "KaimingNormal",
    "KaimingUniform",
    "KeyedJagged",
    "ModuleOptions",
    "MomentumSGD",
    "NewIds",
    "Normal",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "Policy",
    "RMSprop",
    "ReplacementReport",
    "RowBatch",
    "RowWiseAdagrad",
    "RowWiseRMSprop",
    "SSDStore",
    "SampledSoftmaxLoss",
    "SingleTableOptions",
    "SmartDecayAdam",
    "SplitOptimizer",
    "StepWith",
    "StorageStats",
    "TableConfig",
    "TableGroup",
    "TableStats",
    "Top",
    "TruncatedNormal",
    "Uniform",
    "UniformNegatives",
    "XavierNormal",
    "XavierUniform",
    "checkpoint",
    "clip_grad_norm_",
    "delta_log",
    "errors",
    "export_vectors",
    "freeze",
    "hash_strings",
    "in_batch_softmax_loss",
    "insert_new",
    "prefetched",
    "private_to_rank",
    "register_admission",
    "register_module",
    "replace_embeddings",
    "restore_torch",
    "step_with",
    "table_optimizers",
    "top_k",
]


def __getattr__(name: str) -> Any:
    """Import the packages that need more than torch when they are first used."""
    if name in _WITH_MORE_PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, *_WITH_MORE_PACKAGES, "__version__"})
