"""What becomes of a save that goes on in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from torch_dynemb.table.group import TableGroup

_running: SaveHandle | None = None  # the save of this process that is not done yet


class SaveHandle:
    """A save that is done, or goes on in a thread; :func:`torch_dynemb.checkpoint.save` makes it.

    Args:
        path: of the checkpoint.
        groups: tables that are saved: their next ``optimizer.step()`` raises where it fails.

    Attributes:
        path: of the checkpoint.
    """

    def __init__(self, path: Path, groups: Sequence[TableGroup] = ()) -> None:
        self.path = path
        self._groups = list(groups)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is whole on the disk.

        Raises:
            Exception: what has made it fail; the checkpoint that was there before is as it was.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            for group in self._groups:  # told here, so no step has to
                group.tables.host.failure = None
            raise self._error

    def _run(self, work: Callable[[], None]) -> None:
        """Does the work in a thread of its own."""
        global _running

        def run() -> None:
            global _running
            try:
                work()
            except BaseException as error:
                self._error = error
                for group in self._groups:
                    group.tables.host.failure = error
            finally:
                _running = None

        self._thread = threading.Thread(target=run, name=f"checkpoint {self.path.name}")
        _running = self
        self._thread.start()


def check_none_running() -> None:
    """Raises RuntimeError while a save goes on in the background."""
    if _running is not None and not _running.done():
        raise RuntimeError(
            f"checkpoint.save: the one of {_running.path} has not ended yet: wait for it with its "
            "handle's wait(), or save less often"
        )


__all__ = ["SaveHandle", "check_none_running"]
