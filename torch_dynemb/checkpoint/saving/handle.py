"""Handle of a save that may go on in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch_dynemb.errors import BackgroundError, ForkedProcessError, InUseError
from torch_dynemb.files.locations import Location
from torch_dynemb.process.forked import watch
from torch_dynemb.process.waits import wait_until_set
from torch_dynemb.table.background import BackgroundWork
from torch_dynemb.table.group import TableGroup

_last: SaveHandle | None = None  # of this process, in the background


class SaveHandle:
    """A save that is done or runs in a thread; :func:`torch_dynemb.checkpoint.save` creates it.

    A program waits for it at exit. Call :meth:`wait` anyway: a save that fails at exit is only
    logged.

    Args:
        path: path or URL of the checkpoint.

    Attributes:
        path: path or URL of the checkpoint.
        forked: whether this process got the handle from its parent, which runs the thread.
    """

    forked = False

    def __init__(self, path: Location) -> None:
        self.path = path
        self._work = BackgroundWork(f"the asynchronous checkpoint {path}")
        self._ended = threading.Event()
        self._ended.set()

    def done(self) -> bool:
        """Return whether it has ended on this rank, successfully or not. Other ranks may lag
        behind.
        """
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the checkpoint is complete on the disk. Ctrl-C ends the wait, not the save.

        Raises:
            Exception: error of the save; the checkpoint from before is unchanged.
            ForkedProcessError: this process is a fork of the one that saves.
        """
        if self.forked and not self.done():
            raise ForkedProcessError(
                f"checkpoint.save: {self.path} is saved by a thread of the process that this one "
                "is a fork of: wait there",
                path=self.path,
            )
        global _last

        wait_until_set(self._ended)
        error = self._work.error()
        if _last is self:
            _last = None  # do not keep the frames of the error alive here
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None], groups: Sequence[TableGroup]) -> None:
        """Run the work in its own thread.

        Args:
            work: function that raises if it fails.
            groups: saved tables; their next step raises the error of the work.
        """
        global _last

        works = [work]  # it holds the copies, which must be freed when wait() returns
        del work

        def run() -> None:
            try:
                works.pop()()
            except BaseException as error:
                self._work.fail(error)
            finally:
                self._ended.set()

        # not a daemon: the interpreter waits for it at exit
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
    """Raise InUseError while a save runs in the background.

    Raise BackgroundError, once, if the last one has failed and its error was not raised yet.
    """
    if _last is None or _last.forked:
        return
    if not _last.done():
        raise InUseError(
            f"checkpoint: the asynchronous save of {_last.path} has not ended yet: wait for it "
            "with its handle's wait(), or call this again later",
            path=_last.path,
        )
    error = _last._work.unreported_error()
    if error is not None:
        raise BackgroundError(
            f"{_last._work.what} has failed in the background; nothing was done now: call it again "
            f"to go on without it: {error}",
            path=_last.path,
        ) from error


__all__ = ["SaveHandle", "check_none_running"]
