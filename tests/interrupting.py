"""Ctrl-C at a chosen line or op of torch_dynemb: real signals, raised by the process itself."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import torch_dynemb
from torch_dynemb.process import interrupts

_PACKAGE = str(Path(torch_dynemb.__file__).parent)
_SECTIONS = str(Path(interrupts.__file__))

Call = Callable[[], object]


def of_tables(file: str) -> bool:
    """All of torch_dynemb but for what holds signals back."""
    return file.startswith(_PACKAGE) and file != _SECTIONS


def of_sections(file: str) -> bool:
    """What holds signals back."""
    return file == _SECTIONS


@contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Has SIGINT raise KeyboardInterrupt, whatever was to happen before.

    A shell without job control has what it starts in the background ignore it, and torch's
    launchers leave handlers of their own behind.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """What Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


def interrupt_unheld() -> None:
    """What no handler of signals holds back: as where an op fails."""
    raise KeyboardInterrupt


def at_line(call: Call, line: int, files: Callable[[str], bool] = of_tables) -> int:
    """Calls with Ctrl-C before the ``line``-th line of ``files``; returns how many lines ran."""
    ran = 0

    def of_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal ran
        if event == "line":
            ran += 1
            if ran == line:
                interrupt()
        return of_line

    def of_call(frame: FrameType, event: str, _: Any) -> Any:
        return of_line if files(frame.f_code.co_filename) else None

    outer = sys.gettrace()
    with ctrl_c_raises():
        sys.settrace(of_call)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(outer)
    return ran


class _CountedOps(TorchDispatchMode):
    def __init__(self, number: int, act: Call, never_fail: Collection[Any]) -> None:
        super().__init__()
        self.ran, self._number, self._act = 0, number, act
        self._never_fail = never_fail

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._never_fail:
            return result
        self.ran += 1
        if self.ran == self._number:
            self._act()
        return result


def after_op(
    call: Call, number: int, act: Call = interrupt, never_fail: Collection[Any] = ()
) -> int:
    """Calls with Ctrl-C after the ``number``-th op of torch; returns how many ran.

    Args:
        never_fail: ops that do not count.
    """
    ops = _CountedOps(number, act, never_fail)
    with ctrl_c_raises():
        try:
            with ops:
                call()
        except KeyboardInterrupt:
            pass
    return ops.ran
