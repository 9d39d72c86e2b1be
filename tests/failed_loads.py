"""What every load of rows from elsewhere must keep: one that fails anywhere changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from interrupting import after_op, interrupt, interrupt_unheld
from table_content import content
from torch import Tensor


class Load(NamedTuple):
    """A load into something that holds rows already.

    Attributes:
        make: makes what is loaded into, each time with the same content.
        load: loads.
        seen: all that it holds; copies.
        done: whether what is seen, and what an undisturbed load gives, are equal but for what loads
            change last of all.
    """

    make: Callable[[], Any]
    load: Callable[[Any], object]
    seen: Callable[[Any], Any]
    done: Callable[[Any, Any], bool] | None = None


class InjectedError(OSError):
    """A file that cannot be read."""


def fail() -> None:
    """Fails as a read does."""
    raise InjectedError(5, "injected")


WAYS: dict[str, Callable[[], object]] = {
    "an error": fail,
    "Ctrl-C": interrupt,
    "an interrupt that nothing holds back": interrupt_unheld,
}


# The last op of a load; it never fails, so no error follows it.
UNLOCKING = torch.ops.dynemb.unlock_memory.default


def same(one: Any, other: Any) -> bool:
    """Whether two contents are the same, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_failing_load(load: Load, way: str, *, points: int, empty: Any = None) -> None:
    """Fails a load after some of its ops; then loads once more, undisturbed.

    Args:
        load: what is tried.
        way: how it fails.
        points: how many ops it fails after.
        empty: says whether what is seen is nothing at all, which is right then, too.
    """
    before, loaded = load.seen(load.make()), load.make()

    done = same if load.done is None else load.done
    of_torch: set[int] = set()  # failures of torch's own copies of parameters, after the tables

    def disturbed(what: Any, number: int) -> int:
        def call() -> None:
            try:
                load.load(what)
            except InjectedError:
                raise KeyboardInterrupt from None  # which after_op expects
            except RuntimeError as error:
                if "While copying the parameter" not in str(error):  # torch's own words for one
                    raise
                of_torch.add(number)
                raise KeyboardInterrupt from None

        never = [UNLOCKING] if way == "an error" else []
        return after_op(call, number, WAYS[way], never_fail=never)

    count = disturbed(loaded, 0)
    after = load.seen(loaded)
    points = min(points, count)
    assert not same(before, after)
    found = []
    step = -(-count // points)
    for number in range(1 + len(way) % step, count + 1, step):
        what = load.make()
        disturbed(what, number)
        now = load.seen(what)
        kept = same(now, before)
        found.append(kept)
        if not kept and not (empty is not None and empty(now)):
            # signals waited; or it came when all was done, as an error of ours never does
            late = way != "an error" or number in of_torch or load.done is not None
            if late and done(now, after):
                continue
            pytest.fail(f"{way} after op {number} of {count} leaves something else")
        load.load(what)
        # what was emptied has its ids elsewhere
        again = same(load.seen(what), after) if kept else content(what) == content(loaded)
        assert again, f"second load, after op {number} of {count}"
    assert any(found)
