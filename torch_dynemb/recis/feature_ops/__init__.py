"""Features as chains of ops, and an engine that computes many of them in few calls."""

from torch_dynemb.recis.feature_ops.bucketize import Bucketize
from torch_dynemb.recis.feature_ops.cross import FeatureCross
from torch_dynemb.recis.feature_ops.engine import Feature, FeatureEngine
from torch_dynemb.recis.feature_ops.feature_op import FeatureOp
from torch_dynemb.recis.feature_ops.fields import SelectField, SelectFields
from torch_dynemb.recis.feature_ops.fused import (
    FusedBoundaryOP,
    FusedCutoffOP,
    FusedHashOP,
    FusedModOP,
    FusedMultiHashOP,
    FusedOP,
    FusedStringMultiHashOP,
)
from torch_dynemb.recis.feature_ops.hash import Hash, IDMultiHash, StringMultiHash
from torch_dynemb.recis.feature_ops.mask import Mask
from torch_dynemb.recis.feature_ops.mod import Mod
from torch_dynemb.recis.feature_ops.truncate import SequenceLengthError, SequenceTruncate

__all__ = [
    "Bucketize",
    "Feature",
    "FeatureCross",
    "FeatureEngine",
    "FeatureOp",
    "FusedBoundaryOP",
    "FusedCutoffOP",
    "FusedHashOP",
    "FusedModOP",
    "FusedMultiHashOP",
    "FusedOP",
    "FusedStringMultiHashOP",
    "Hash",
    "IDMultiHash",
    "Mask",
    "Mod",
    "SelectField",
    "SelectFields",
    "SequenceLengthError",
    "SequenceTruncate",
    "StringMultiHash",
]
