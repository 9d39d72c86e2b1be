"""Deferral of signals while a table changes in several steps."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# The signal module without its enums, because a section would create a hundred of them.
_signal: Any = importlib.import_module("_signal")
_Handler = Callable[[int, FrameType | None], object]

_SIGNALS = sorted(int(signum) for signum in signal.valid_signals())
_depth = 0  # open sections of the main thread, the only one that runs handlers
_arrived: list[int] = []  # since the outermost section began


class _Deferred:
    """A handler that waits for the end of a section.

    If it stays installed, because a signal came while handlers were restored, it restores the
    original one itself.
    """

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if _depth > 0:
            if signum not in _arrived:
                _arrived.append(signum)
            return
        self.put_back(signum)
        self._handler(signum, frame)

    def put_back(self, signum: int) -> None:
        _signal.signal(signum, self._handler)


class _Section:
    _in_main_thread = False

    def __enter__(self) -> None:
        global _depth
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread runs handlers and may change them
        self._in_main_thread = True
        if _depth == 0:
            # all signals, not just Ctrl-C: launchers, timeouts and torch's DataLoader have handlers
            # that raise
            for signum in _SIGNALS:
                handler = _signal.getsignal(signum)
                if callable(handler) and not isinstance(handler, _Deferred):
                    _signal.signal(signum, _Deferred(handler))
        _depth += 1

    def __exit__(self, *error: object) -> None:
        global _depth
        if not self._in_main_thread:
            return
        _depth -= 1
        if _depth > 0:
            return
        try:
            for signum in _SIGNALS:
                handler = _signal.getsignal(signum)
                if isinstance(handler, _Deferred):
                    handler.put_back(signum)
        finally:
            _deliver(sys._getframe(1))


def _deliver(frame: FrameType) -> None:
    """Call the handlers of the deferred signals; all of them, even if one raises."""
    if not _arrived:
        return
    signum = _arrived.pop(0)
    try:
        handler = _signal.getsignal(signum)
        if callable(handler):
            handler(signum, frame)
    finally:
        _deliver(frame)


def defer_signals() -> _Section:
    """Return a section of code that signals do not interrupt: Ctrl-C takes effect at its end.

    Python runs signal handlers between any two instructions of the main thread, and handlers raise.
    The code of a section runs as a whole or not at all. Sections may be nested. Keep reading,
    checking and user code outside: inside it cannot be interrupted.
    """
    return _Section()


__all__ = ["defer_signals"]
