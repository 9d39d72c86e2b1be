"""Progress bars of saves and loads."""

from __future__ import annotations

import sys
from typing import Any


class _Hidden:
    """A bar that nobody sees."""

    def update(self, size: int) -> None:
        pass

    def __enter__(self) -> _Hidden:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def progress_bar(what: str, total: int, shown: bool | None) -> Any:
    """A bar of bytes, to be closed; ``update(bytes)`` advances it.

    Args:
        what: is done.
        total: bytes.
        shown: None: where the standard error is a terminal.
    """
    hidden = not sys.stderr.isatty() if shown is None else not shown
    if hidden:
        return _Hidden()
    from tqdm import tqdm  # here: programs without bars do without

    return tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False)


__all__ = ["progress_bar"]
