"""Waits for threads that a signal ends."""

from __future__ import annotations

import threading

_SECONDS = 1.0


def wait_until_set(event: threading.Event) -> None:
    """Wait for an event; a handler of signals that raises, as Ctrl-C's does, ends the wait.

    Not ``Thread.join()``: in Python 3.11, a Ctrl-C in it makes a running thread look ended. Not one
    ``Event.wait()``: a signal just before the thread sleeps does not wake it, so handlers would run
    after the wait.
    """
    while not event.wait(_SECONDS):
        pass


__all__ = ["wait_until_set"]
