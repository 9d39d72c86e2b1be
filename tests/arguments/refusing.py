"""Rows of tables of wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

# a call, the error that it raises, and what is said of the argument, its value and the remedy
Row = tuple[Callable[[], object], type[Exception], str]
MODULES = ("ops", "td", "oneembedding", "serving", "migrate", "torch")


def raising(error: type[Exception], *calls: tuple[Callable[[], object], str]) -> list[Row]:
    """Rows of calls that raise the same error."""
    return [(call, error, words) for call, words in calls]


def called(call: Callable[[], object]) -> str:
    """The function that a call is of; "" where it has no name."""
    if isinstance(call, partial):
        return getattr(call.func, "__name__", "")
    return next((name for name in call.__code__.co_names if name not in MODULES), "")


def cases(rows: list[Row]) -> list[Any]:
    """Cases of a test; the id of each begins with the name of what is called."""
    return [pytest.param(*row, id=f"{called(row[0])} {row[2]}") for row in rows]
