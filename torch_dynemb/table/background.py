"""Work of a thread for tables while they train, and the report of its error."""

from __future__ import annotations

import logging
import traceback
import weakref

_logger = logging.getLogger("torch_dynemb")


class BackgroundTraceback(Exception):  # noqa: N818 - the cause of another error
    """Traceback of a thread's error, as text: the cause of the error raised in another thread."""


class BackgroundWork:
    """Work of a thread for tables, such as writing a checkpoint.

    An error is reported once by a call that did not ask for it, such as the next step. It is logged
    if the program ends, or the tables are freed, before any report.

    Args:
        what: name of the work in messages.

    Attributes:
        what: name of the work in messages.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._error: BaseException | None = None
        self._unreported: list[BaseException] = []
        weakref.finalize(self, _log, what, self._unreported)

    def fail(self, error: BaseException) -> None:
        """Keep an error, with its traceback as text.

        The frames of the traceback would keep the thread's data alive, such as copies of tables.
        """
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        error.__cause__, error.__context__ = BackgroundTraceback(f"\n{text}"), None
        self._error = error.with_traceback(None)
        self._unreported.append(error)

    def error(self) -> BaseException | None:
        """Return the error, or None; it counts as reported from now on."""
        self.unreported_error()
        return self._error

    def unreported_error(self) -> BaseException | None:
        """Return the error if it has not been reported, else None; it is reported from now on."""
        try:
            return self._unreported.pop()
        except IndexError:
            return None


def _log(what: str, unreported: list[BaseException]) -> None:
    for error in unreported:
        _logger.error("%s has failed, and no call has reported it", what, exc_info=error)


__all__ = ["BackgroundTraceback", "BackgroundWork"]
