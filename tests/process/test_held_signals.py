"""Sections that hold signals back: all are heard at their end, and each once."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
from interrupting import (
    at_line,
    interrupt,
    of_sections,
)

from torch_dynemb.process.interrupts import defer_signals

pytestmark = [pytest.mark.any_device, pytest.mark.usefixtures("ctrl_c")]


class StoppedError(Exception):
    """Raised by handlers that are not Python's own."""


@pytest.fixture
def heard() -> Any:
    """Signals that a handler has heard, which raises."""
    signals: list[int] = []

    def handler(signum: int, frame: Any) -> None:
        signals.append(signum)
        raise StoppedError

    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1)}
    for signum in before:
        signal.signal(signum, handler)
    yield signals
    for signum, old in before.items():
        assert signal.getsignal(signum) is handler
        signal.signal(signum, old)


def test_signals_wait_for_the_end_of_the_outermost_section(heard: list[int]) -> None:
    done = []

    def sections() -> None:
        with defer_signals():
            with defer_signals():
                signal.raise_signal(signal.SIGTERM)
                done.append("inner")
            signal.raise_signal(signal.SIGTERM)  # of several, one
            done.append("outer")
        done.append("after")

    handlers = [signal.getsignal(signum) for signum in signal.valid_signals()]
    with pytest.raises(StoppedError):
        sections()
    assert done == ["inner", "outer"]
    assert heard == [signal.SIGTERM]
    assert handlers == [signal.getsignal(signum) for signum in signal.valid_signals()]


def test_all_signals_are_heard_although_handlers_raise(heard: list[int]) -> None:
    def section() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("of the section")

    with pytest.raises(StoppedError):
        section()
    assert heard == [signal.SIGUSR1, signal.SIGTERM]


def test_signals_are_heard_at_once_outside_of_sections(heard: list[int]) -> None:
    with defer_signals():
        pass
    with pytest.raises(StoppedError):
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_a_signal_at_any_line_of_a_section_is_heard_once() -> None:
    def section(ran: list[int]) -> None:
        with defer_signals():
            ran.append(1)
            ran.append(2)

    handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    lines = at_line(lambda: section([]), 0, of_sections)
    assert lines > 100
    for line in range(1, lines + 1):
        ran: list[int] = []
        interrupted = []

        def call(ran: list[int] = ran, interrupted: list[int] = interrupted) -> None:
            try:
                section(ran)
            except KeyboardInterrupt:
                interrupted.append(1)

        at_line(call, line, of_sections)
        assert interrupted == [1]
        assert ran in ([], [1, 2])
        # handlers that an interrupt has left behind go away with the next section
        with defer_signals():
            pass
        assert {s: signal.getsignal(s) for s in signal.valid_signals()} == handlers


def test_other_threads_hold_nothing_back() -> None:
    """Handlers run in the main thread, so that nothing can interrupt a section of another one."""
    inside, leave = threading.Event(), threading.Event()

    def section() -> None:
        with defer_signals():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=section)
    thread.start()
    inside.wait()
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    finally:
        leave.set()
        thread.join()
