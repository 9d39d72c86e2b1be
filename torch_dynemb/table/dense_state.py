"""State dicts of the dense state: models without their tables, which are saved apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_left_out: ContextVar[bool] = ContextVar("tables are left out of state dicts", default=False)


@contextmanager
def dense_only() -> Iterator[None]:
    """Make ``state_dict()`` and ``load_state_dict()`` of models skip the tables in this context."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


def leaves_tables_out() -> bool:
    """Return whether state dicts currently have no entries of tables."""
    return _left_out.get()


__all__ = ["dense_only", "leaves_tables_out"]
