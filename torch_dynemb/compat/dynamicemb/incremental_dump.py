"""Increments by score, as in ``dynamicemb.incremental_dump``."""

from torch_dynemb.compat.dynamicemb.not_offered import refusing
from torch_dynemb.torchrec.dynamicemb.increments import (
    get_score,
    incremental_dump,
    pop_evicted_keys,
    set_score,
)

__getattr__ = refusing(__name__)

__all__ = ["get_score", "incremental_dump", "pop_evicted_keys", "set_score"]
