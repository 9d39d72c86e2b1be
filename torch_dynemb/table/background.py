"""Work that a thread does for tables while they train, and what becomes of its error."""

from __future__ import annotations

import logging
import traceback
import weakref

_logger = logging.getLogger("torch_dynemb")


class BackgroundTraceback(Exception):  # noqa: N818 - no error of its own
    """Where an error was raised, as text: it is the cause of the error that is raised elsewhere."""


class BackgroundWork:
    """What a thread does for tables, such as writing a checkpoint.

    Its error is told once to those who did not ask for it, such as the next step. Where nobody has
    been told when the program ends, or when nothing is left that could tell, it is logged.

    Args:
        what: names the work in messages.

    Attributes:
        what: names the work in messages.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._error: BaseException | None = None
        self._untold: list[BaseException] = []
        weakref.finalize(self, _log, what, self._untold)

    def fail(self, error: BaseException) -> None:
        """Keeps an error, of whose traceback only the text remains.

        The frames have what the thread has worked on, such as copies of tables.
        """
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        error.__cause__, error.__context__ = BackgroundTraceback(f"\n{text}"), None
        self._error = error.with_traceback(None)
        self._untold.append(error)

    def error(self) -> BaseException | None:
        """The error, if there is one, for somebody who asks; counts as told from now on."""
        self.untold_error()
        return self._error

    def untold_error(self) -> BaseException | None:
        """The error, if there is one that nobody has been told; told from now on."""
        try:
            return self._untold.pop()
        except IndexError:
            return None


def _log(what: str, untold: list[BaseException]) -> None:
    for error in untold:
        _logger.error("%s has failed, and nobody has asked for it", what, exc_info=error)


__all__ = ["BackgroundTraceback", "BackgroundWork"]
