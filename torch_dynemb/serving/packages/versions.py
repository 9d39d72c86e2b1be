"""Copies of a package that take turns: runs read one while another one is changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch_dynemb.checkpoint.delta_log.targets import nothing
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.serving.packages.loaded import Loaded

Result = TypeVar("Result")


class Versions:
    """One copy of a package, which is changed in place, or two, of which runs read one.

    Of two, a change is made in the copy that nothing runs. From then on runs begin on that copy,
    and the other one takes the change before it is changed again. So a run reads one version of all
    rows and of the dense part, and waits for no change.

    Args:
        copies: of the package; one or two.
    """

    def __init__(self, copies: Sequence[Loaded]) -> None:
        self._copies = list(copies)
        self._running = [0] * len(copies)
        self._active = 0
        self._ended = threading.Condition()
        self._changing = threading.Lock()
        self._behind: Callable[[Loaded], object] | None = None  # what the other copy lacks

    @contextmanager
    def reading(self) -> Iterator[Loaded]:
        """The copy that runs read now, which does not change meanwhile where there are two."""
        with self._ended:
            number = self._active
            self._running[number] += 1
        try:
            yield self._copies[number]
        finally:
            with self._ended:
                self._running[number] -= 1
                if self._running[number] == 0:
                    self._ended.notify_all()

    def change(
        self, make: Callable[[Loaded], Result], made: Callable[[], object] = nothing
    ) -> Result:
        """Changes what runs read that begin from now on.

        Args:
            make: changes a copy, or raises and leaves it as it was; it is called again for the
                other copy, later.
            made: is called when runs get the change, before signals come.

        Returns:
            What it returns for the first copy.

        Raises:
            Exception: what it raises; nothing has changed.
        """
        with self._changing:
            if len(self._copies) == 1:
                with defer_signals():
                    result = make(self._copies[0])
                    made()
                return result
            other = 1 - self._active
            with self._ended:
                self._ended.wait_for(lambda: self._running[other] == 0)
            copy = self._copies[other]
            with defer_signals():
                if self._behind is not None:
                    self._behind(copy)
                    self._behind = None
                result = make(copy)
                self._behind = make
                with self._ended:
                    self._active = other
                made()
            return result


__all__ = ["Versions"]
