"""A store that fails at a chosen request, and one without conditional PUTs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from torch_dynemb.files.object_store import ObjectStore

WRITES = ("put", "create", "stream", "remove", "remove_files", "sizes")


class Dead(BaseException):
    """The process is dead: no request after it does anything."""


@contextmanager
def failing(
    at: int, *, dead: bool = False, done: bool = False, calls: tuple[str, ...] = WRITES
) -> Iterator[list[str]]:
    """Requests of these kinds are counted, and one of them fails.

    Args:
        at: number of the request that fails, from 1; 0: none.
        dead: no later request does anything, as after the end of a process.
        done: the store has done what was asked for, although the request fails.
        calls: methods of the store that are counted.

    Returns:
        The requests.
    """
    seen: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if dead and at != 0 and len(seen) >= at:
                raise Dead
            seen.append(name)
            if len(seen) == at:
                if done:
                    call(*arguments)
                raise Dead if dead else OSError(5, "the store has failed")
            return call(*arguments)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(ObjectStore, name, counted(name, getattr(ObjectStore, name)))
        yield seen
