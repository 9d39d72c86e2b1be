"""State dicts of models without their tables, which are saved apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_left_out: ContextVar[bool] = ContextVar("tables are left out of state dicts", default=False)


@contextmanager
def dense_only() -> Iterator[None]:
    """While it lasts, ``state_dict()`` and ``load_state_dict()`` of models pass over the tables."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


def leaves_tables_out() -> bool:
    """Whether state dicts have no entries of tables now."""
    return _left_out.get()


__all__ = ["dense_only", "leaves_tables_out"]
