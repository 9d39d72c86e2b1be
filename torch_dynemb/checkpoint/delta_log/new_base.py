"""A base that takes the place of a former one, and the commits that stay before it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from torch_dynemb.argument_checks import described, duration, integer
from torch_dynemb.checkpoint.saving.handle import SaveHandle


@dataclass
class NewBase:
    """A base that is saved, perhaps while training goes on.

    Attributes:
        handle: the save.
        path: path of the base.
        sequence: number of the last commit that it includes.
        first: number of the first commit that names it; None as long as it is not whole.
    """

    handle: SaveHandle
    path: Path
    sequence: int
    first: int | None = None


class Retention:
    """Choice of the commits before a base that stay.

    Args:
        retain: number of commits, or a text such as ``"1h"``; None: those since the former base.

    Raises:
        TypeError, ValueError: it is something else.
    """

    def __init__(self, retain: int | str | None) -> None:
        self._seconds: int | None = None
        self._commits: int | None = None
        self._published: list[tuple[float, int]] = []
        if isinstance(retain, str):
            self._seconds = duration("DeltaLog: retain", retain)
        elif retain is not None:
            if isinstance(retain, bool) or not isinstance(retain, int):
                raise TypeError(
                    f"DeltaLog: retain is {described(retain)}, expected a number of commits, a "
                    "text such as '1h', or None"
                )
            self._commits = integer("DeltaLog: retain", retain, least=0)

    def published(self, sequence: int) -> None:
        """Note the time of a commit. The machine's clock may be set back meanwhile.

        Args:
            sequence: number of the commit.
        """
        if self._seconds is not None:
            now = time.monotonic()
            self._published.append((now, sequence))
            while self._published[0][0] < now - self._seconds:
                self._published.pop(0)

    def first(self, *, last: int, base: int, former: int) -> int:
        """Return the number of the first commit that stays.

        Args:
            last: number of the last commit.
            base: number of the last commit that the newest base includes.
            former: likewise of the base before.
        """
        if self._commits is not None:
            kept = last - self._commits + 1
        elif self._seconds is not None:
            oldest = time.monotonic() - self._seconds
            recent = [sequence for at, sequence in self._published if at >= oldest]
            kept = min(recent, default=last + 1)
        else:
            kept = former + 1
        return max(0, min(kept, base + 1))


__all__ = ["NewBase", "Retention"]
