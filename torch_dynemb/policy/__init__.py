"""Which ids get a row, and how long they keep it."""

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

__all__ = [
    "AdmitBy",
    "AdmitByChance",
    "AdmitFrequent",
    "AdmitFrequentSketch",
    "AdmitNone",
    "FeaturePolicy",
    "NewIds",
    "Policy",
    "register_admission",
]
