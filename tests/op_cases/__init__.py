"""Arguments for every op of ``torch.ops.dynemb``: small groups, fresh tensors on every call."""

from __future__ import annotations

from op_cases import frozen, ids, index, pooling, process, ragged, rows, serving, storage, tiers
from op_cases.groups import OPTIMIZERS, Case, make_group, pooled_call
from op_cases.names import ops_with_cases, schema

__all__ = [
    "CASES",
    "OPTIMIZERS",
    "REGISTERED",
    "Case",
    "make_group",
    "ops_with_cases",
    "pooled_call",
    "schema",
]

REGISTERED = tiers.REGISTERED
CASES: dict[str, dict[str, Case]] = {
    **process.CASES,
    **ids.CASES,
    **pooling.CASES,
    **ragged.CASES,
    **index.CASES,
    **rows.CASES,
    **storage.CASES,
    **tiers.CASES,
    **frozen.CASES,
    **serving.CASES,
}
