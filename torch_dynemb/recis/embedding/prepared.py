"""Lookups whose ids are on their way to other ranks, while other work is done."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_dynemb.recis.embedding.joint_lookup import JointLookup


class PreparedLookup(NamedTuple):
    """Lookups whose ids are on their way to the ranks that have their rows.

    Attributes:
        lookups: with the names of the features of each.
        passed: what is returned as it came.
    """

    lookups: list[tuple[list[str], JointLookup]]
    passed: dict[str, Any]


def finished(prepared: PreparedLookup) -> dict[str, Any]:
    """Ends lookups: their results by name, and what is returned as it came."""
    results = dict(prepared.passed)
    for names, lookup in prepared.lookups:
        results |= zip(names, lookup.rows(), strict=True)
    return results


__all__ = ["PreparedLookup", "finished"]
