"""Life-cycle policies: admission of new ids, and the lifetime of their rows."""

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
from torch_dynemb.policy.policy import FeaturePolicy, Policy

__all__ = [
    "AdmitBy",
    "AdmitByChance",
    "AdmitFrequent",
    "AdmitFrequentSketch",
    "AdmitNone",
    "Custom",
    "FeaturePolicy",
    "NewIds",
    "Policy",
    "register_admission",
]
