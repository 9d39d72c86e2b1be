"""Pickling of tables for other processes: state travels as bytes."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type[Any])


def sent_as_bytes(cls: Class) -> Class:
    """Make multiprocessing send the state of a class's objects as bytes: a class decorator.

    This holds for arguments of processes, queues and pipes. By default torch would share the memory
    of the copied state, and close its file descriptors before a spawned process has started.
    """
    ForkingPickler.register(cls, _sent)
    return cls


def _sent(thing: Any) -> tuple[Any, ...]:
    state = pickle.dumps(thing.__getstate__(), protocol=pickle.HIGHEST_PROTOCOL)
    return _received, (type(thing), state)


def _received(cls: type[Any], state: bytes) -> Any:
    thing: Any = object.__new__(cls)
    thing.__setstate__(pickle.loads(state))
    return thing


__all__ = ["sent_as_bytes"]
