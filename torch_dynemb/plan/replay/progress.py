"""Progress of a replay on the standard error, if that is a terminal and rich is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(lines: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while the context lasts.

    Args:
        lines: number of lines of all tables.

    Yields:
        Function that takes the number of further lines.
    """
    try:
        rich = importlib.import_module("rich.progress") if sys.stderr.isatty() else None
    except ImportError:
        rich = None
    if rich is None:
        yield lambda _: None
        return
    console = importlib.import_module("rich.console").Console(stderr=True)
    with rich.Progress(console=console, transient=True) as bar:
        task = bar.add_task("replay", total=lines)
        yield lambda more: bar.advance(task, more)


__all__ = ["progress"]
