"""Progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress(items: Iterable[T], description: str, *, depth: int = 0) -> Iterator[T]:
    """Go over items with a progress bar.

    Where tqdm is not installed, as may be on a machine with a GPU, the outermost items are counted
    line by line.

    Args:
        items: what to go over.
        description: what the bar is called.
        depth: number of bars above this one, which goes away at its end unless there are none.

    Yields:
        The items.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        for number, item in enumerate(items):
            if depth == 0:
                print(f"{description}: {number}", file=sys.stderr, flush=True)
            yield item
        return
    yield from tqdm(items, desc=description, file=sys.stderr, leave=depth == 0, position=depth)
