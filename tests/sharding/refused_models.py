"""What sharding refuses, on every rank."""

from __future__ import annotations

from typing import Any

from sharded_models import Table, sharded


def refusal(rank: int, tables: tuple[Table, ...], arguments: dict[str, Any]) -> str:
    """Type and message of what ``sharded`` raises."""
    try:
        sharded(tables, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
