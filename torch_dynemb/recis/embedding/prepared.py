"""Lookups in progress: other ranks receive their ids while this rank does other work."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_dynemb.recis.embedding.joint_lookup import JointLookup


class PreparedLookup(NamedTuple):
    """Started lookups: their ids are in transit to the ranks that have their rows.

    Attributes:
        lookups: with the names of the features of each.
        passed: entries that are returned unchanged.
    """

    lookups: list[tuple[list[str], JointLookup]]
    passed: dict[str, Any]


def finished(prepared: PreparedLookup) -> dict[str, Any]:
    """Finish lookups and return their results by name, beside the unchanged entries."""
    results = dict(prepared.passed)
    for names, lookup in prepared.lookups:
        results |= zip(names, lookup.rows(), strict=True)
    return results


__all__ = ["PreparedLookup", "finished"]
