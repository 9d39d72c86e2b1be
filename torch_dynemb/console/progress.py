"""Progress bars of saves and loads."""

from __future__ import annotations

import sys
from typing import Any


class _Hidden:
    """A progress bar that shows nothing."""

    def update(self, size: int) -> None:
        pass

    def __enter__(self) -> _Hidden:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def progress_bar(what: str, total: int, shown: bool | None) -> Any:
    """Return a progress bar in bytes; ``update(bytes)`` advances it, and the caller closes it.

    Args:
        what: label of the bar.
        total: number of bytes.
        shown: whether to show it; None: if the standard error is a terminal.
    """
    hidden = not sys.stderr.isatty() if shown is None else not shown
    if hidden:
        return _Hidden()
    from tqdm import tqdm  # imported here, so that tqdm stays optional

    return tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False)


__all__ = ["progress_bar"]
