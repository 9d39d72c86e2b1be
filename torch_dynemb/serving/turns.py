"""Turns between runs of a model, side by side, and a change of it, alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Turns:
    """A lock that any number of threads hold to read, or one thread to change.

    A waiting change precedes threads that begin to read.
    """

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._reading, self._waiting, self._changing = 0, 0, False
        self._own = threading.local()

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()

    def begin(self) -> None:
        """Wait until no change runs or waits, then read until :meth:`end`."""
        depth = getattr(self._own, "depth", 0)
        if depth == 0:  # otherwise a waiting change would wait for this thread
            with self._moved:
                self._moved.wait_for(lambda: not self._changing and self._waiting == 0)
                self._reading += 1
        self._own.depth = depth + 1

    def end(self) -> None:
        """End reading."""
        self._own.depth -= 1
        if self._own.depth == 0:
            with self._moved:
                self._reading -= 1
                if self._reading == 0:
                    self._moved.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock for a change, while nothing reads."""
        with self._moved:
            self._waiting += 1
            try:
                self._moved.wait_for(lambda: not self._changing and self._reading == 0)
                self._changing = True
            finally:
                self._waiting -= 1
                self._moved.notify_all()
        try:
            yield
        finally:
            with self._moved:
                self._changing = False
                self._moved.notify_all()


def turns_of(model: nn.Module) -> Turns:
    """Return the turns of a model's runs, taken by hooks of its forward; they stay with the model.

    Args:
        model: its runs wait while it is changed. Runs of its parts alone do not.
    """
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, _Begin):
            return hook.turns
    turns = Turns()
    model.register_forward_pre_hook(_Begin(turns), prepend=True)
    model.register_forward_hook(_end_of(turns), always_call=True)
    return turns


class _Begin:
    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.turns.begin()


def _end_of(turns: Turns) -> Callable[[nn.Module, Any, Any], None]:
    def end(module: nn.Module, args: Any, output: Any) -> None:
        turns.end()

    return end


__all__ = ["Turns", "turns_of"]
