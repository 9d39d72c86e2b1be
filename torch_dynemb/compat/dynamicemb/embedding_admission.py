"""Admission of ids, as in ``dynamicemb.embedding_admission``."""

from torch_dynemb.compat.dynamicemb.not_offered import refusing
from torch_dynemb.torchrec.dynamicemb.options import (
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilisticAdmissionStrategy,
)

__getattr__ = refusing(__name__)

__all__ = ["FrequencyAdmissionStrategy", "KVCounter", "ProbabilisticAdmissionStrategy"]
