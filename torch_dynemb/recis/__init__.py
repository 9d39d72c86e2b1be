"""Ragged embeddings with the names and arguments of RecIS (github.com/alibaba/RecIS)."""

from torch_dynemb.recis.embedding import DynamicEmbedding, EmbeddingEngine, PreparedLookup
from torch_dynemb.recis.feature_engine import Feature, FeatureEngine
from torch_dynemb.recis.feature_ops.fused import (
    FusedBoundaryOP,
    FusedCutoffOP,
    FusedHashOP,
    FusedModOP,
    FusedMultiHashOP,
    FusedOP,
)
from torch_dynemb.recis.feature_ops.ops import (
    Bucketize,
    FeatureCross,
    FeatureOp,
    Hash,
    IDMultiHash,
    Mod,
    SelectField,
    SelectFields,
    SequenceLengthError,
    SequenceTruncate,
)
from torch_dynemb.recis.hash_table import (
    ChildrenInfo,
    HashTable,
    IdsMap,
    filter_out_sparse_param,
)
from torch_dynemb.recis.hooks import (
    READ_ONLY,
    AdmitHook,
    FilterHook,
    RowFilter,
    register_admit_hook,
    register_filter_hook,
)
from torch_dynemb.recis.initializers import (
    ConstantInitializer,
    KaimingNormalInitializer,
    KaimingUniformInitializer,
    NormalInitializer,
    TruncNormalInitializer,
    UniformInitializer,
    XavierNormalInitializer,
    XavierUniformInitializer,
)
from torch_dynemb.recis.optimizers import (
    SparseAdam,
    SparseAdamW,
    SparseAdamWTF,
    SparseOptimizer,
)
from torch_dynemb.recis.options import EmbeddingOption
from torch_dynemb.recis.ragged.tensor import RaggedTensor
from torch_dynemb.recis.slices import Slice, gen_slice
from torch_dynemb.recis.slots import Slot, SlotGroup
from torch_dynemb.recis.state_parts import split_sparse_dense_state_dict

__all__ = [
    "READ_ONLY",
    "AdmitHook",
    "Bucketize",
    "ChildrenInfo",
    "ConstantInitializer",
    "DynamicEmbedding",
    "EmbeddingEngine",
    "EmbeddingOption",
    "Feature",
    "FeatureCross",
    "FeatureEngine",
    "FeatureOp",
    "FilterHook",
    "FusedBoundaryOP",
    "FusedCutoffOP",
    "FusedHashOP",
    "FusedModOP",
    "FusedMultiHashOP",
    "FusedOP",
    "Hash",
    "HashTable",
    "IDMultiHash",
    "IdsMap",
    "KaimingNormalInitializer",
    "KaimingUniformInitializer",
    "Mod",
    "NormalInitializer",
    "PreparedLookup",
    "RaggedTensor",
    "RowFilter",
    "SelectField",
    "SelectFields",
    "SequenceLengthError",
    "SequenceTruncate",
    "Slice",
    "Slot",
    "SlotGroup",
    "SparseAdam",
    "SparseAdamW",
    "SparseAdamWTF",
    "SparseOptimizer",
    "TruncNormalInitializer",
    "UniformInitializer",
    "XavierNormalInitializer",
    "XavierUniformInitializer",
    "filter_out_sparse_param",
    "gen_slice",
    "register_admit_hook",
    "register_filter_hook",
    "split_sparse_dense_state_dict",
]
