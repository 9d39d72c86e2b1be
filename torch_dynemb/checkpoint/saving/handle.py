"""What becomes of a save that goes on in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from torch_dynemb.errors import BackgroundError, ForkedProcessError, InUseError
from torch_dynemb.process.forked import watch
from torch_dynemb.table.background import BackgroundWork
from torch_dynemb.table.group import TableGroup

_last: SaveHandle | None = None  # of this process, in the background


class SaveHandle:
    """A save that is done, or goes on in a thread; :func:`torch_dynemb.checkpoint.save` makes it.

    A program that ends waits for it. Call :meth:`wait` before, all the same: who ends without, ends
    well although the save may have failed, which then is only logged.

    Args:
        path: of the checkpoint.

    Attributes:
        path: of the checkpoint.
        forked: whether this process got the handle from its parent, which has the thread.
    """

    forked = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._work = BackgroundWork(f"the asynchronous checkpoint {path}")
        # not Thread.join() and is_alive(): in Python 3.11 a Ctrl-C in join() makes the thread that
        # goes on look like one that has ended
        self._ended = threading.Event()
        self._ended.set()

    def done(self) -> bool:
        """Whether it has ended here, well or not; other ranks may be a moment behind."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Waits until the checkpoint is whole on the disk. Ctrl-C ends the wait, not the save.

        Raises:
            Exception: what has made it fail; the checkpoint that was there before is as it was.
            ForkedProcessError: this process is a fork of the one that saves.
        """
        if self.forked and not self.done():
            raise ForkedProcessError(
                f"checkpoint.save: {self.path} is saved by a thread of the process that this one "
                "is a fork of: wait there",
                path=self.path,
            )
        global _last

        self._ended.wait()
        error = self._work.error()
        if _last is self:
            _last = None  # whoever catches the error keeps its frames, and this module does not
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None], groups: Sequence[TableGroup]) -> None:
        """Does the work in a thread of its own.

        Args:
            work: raises where it fails.
            groups: tables that are saved: their next step raises where it fails.
        """
        global _last

        works = [work]  # it has the copies, which must be gone when wait() returns
        del work

        def run() -> None:
            try:
                works.pop()()
            except BaseException as error:
                self._work.fail(error)
            finally:
                self._ended.set()

        # no daemon: the interpreter waits for it before it ends
        thread = threading.Thread(target=run, name=f"checkpoint {self.path.name}", daemon=False)
        self._ended.clear()
        watch(self)
        try:
            thread.start()
        except BaseException:
            self._ended.set()
            raise
        _last = self
        for group in groups:
            group.tables.host.background = self._work


def check_none_running() -> None:
    """Raises InUseError while a save goes on in the background.

    Raises BackgroundError, once, where the last one has failed and nobody has been told.
    """
    if _last is None or _last.forked:
        return
    if not _last.done():
        raise InUseError(
            f"checkpoint: the asynchronous save of {_last.path} has not ended yet: wait for it "
            "with its handle's wait(), or save less often",
            path=_last.path,
        )
    error = _last._work.untold_error()
    if error is not None:
        raise BackgroundError(
            f"{_last._work.what} has failed in the background; nothing was done now: call it again "
            f"to go on without it: {error}",
            path=_last.path,
        ) from error


__all__ = ["SaveHandle", "check_none_running"]
