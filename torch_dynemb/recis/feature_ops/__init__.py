"""Ops of a feature engine, with the names and arguments of RecIS's."""

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

__all__ = [
    "Bucketize",
    "FeatureCross",
    "FeatureOp",
    "FusedBoundaryOP",
    "FusedCutoffOP",
    "FusedHashOP",
    "FusedModOP",
    "FusedMultiHashOP",
    "FusedOP",
    "Hash",
    "IDMultiHash",
    "Mod",
    "SelectField",
    "SelectFields",
    "SequenceLengthError",
    "SequenceTruncate",
]
