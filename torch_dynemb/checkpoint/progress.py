"""Progress bars of saves and loads."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(what: str, total: int, shown: bool | None) -> Any:
    """A bar of bytes, to be closed; ``update(bytes)`` advances it.

    Args:
        what: is done.
        total: bytes.
        shown: None: where the standard error is a terminal.
    """
    hidden = not sys.stderr.isatty() if shown is None else not shown
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=hidden, leave=False)


__all__ = ["progress_bar"]
