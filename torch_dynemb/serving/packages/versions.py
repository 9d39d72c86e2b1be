"""Copies of a package that take turns: runs read one while another one is changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeVar

from torch_dynemb.delta_log.targets import nothing
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.serving.file_tables import OpenedFile
from torch_dynemb.serving.packages.loaded import Loaded

Result = TypeVar("Result")


class ServedPosition(NamedTuple):
    """Position in a delta log of tables that another process may change.

    Attributes:
        sequence: number of the last commit; None: the rows are those of the base.
        dense_behind: number of commits that were applied without their dense state.
        age: seconds since the last commit was applied; None: there was none since the export.
        follows_dense: whether commits change the dense state.
    """

    sequence: int | None
    dense_behind: int
    age: float | None
    follows_dense: bool


class Versions:
    """One copy of a package, changed in place, or two, of which runs read one.

    With two copies, a change is made in the one without runs. From then on runs begin on that copy.
    The other copy takes the change before its next change. So a run reads one version of all rows
    and of the dense state, and never waits for a change.

    Args:
        copies: of the package; one or two.
    """

    def __init__(self, copies: Sequence[Loaded]) -> None:
        self._copies = list(copies)
        self._running = [0] * len(copies)
        self._active = 0
        self._ended = threading.Condition()
        self._changing = threading.Lock()
        # nothing waits for the runs of a single copy
        self._only = nullcontext(self._copies[0]) if len(self._copies) == 1 else None
        self._behind: Callable[[Loaded], object] | None = None  # change that the other copy lacks

    def position(self) -> ServedPosition | None:
        """Return the position in a delta log; None: a follower of this process has it."""
        return None

    def opened(self) -> list[OpenedFile]:
        """Return the files of rows of all copies."""
        return [file for copy in self._copies for file in copy.opened]

    def reading(self) -> AbstractContextManager[Loaded]:
        """Yield the copy that runs read now; with two copies it does not change meanwhile."""
        return self._reading() if self._only is None else self._only

    @contextmanager
    def _reading(self) -> Iterator[Loaded]:
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
        """Change the copy that later runs read.

        Args:
            make: changes a copy, or raises and leaves it as it was; it is called again for the
                other copy, later.
            made: called when runs get the change, before signals are delivered.

        Returns:
            The result of ``make`` for the first copy.

        Raises:
            Exception: raised by ``make``; nothing has changed.
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


__all__ = ["ServedPosition", "Versions"]
