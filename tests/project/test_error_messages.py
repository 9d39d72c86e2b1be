"""Every error message is in one list, which was read as a user reads it."""

from __future__ import annotations

import pytest
from error_messages import LIST, cpp_messages, error_messages, python_messages

pytestmark = pytest.mark.cpu_only("reads sources")


def test_the_list_is_up_to_date() -> None:
    """Read what is new: does it name the argument, the value and the remedy?"""
    assert error_messages() == LIST.read_text(), (
        "messages have changed: python tests/project/error_messages.py --write, and read the "
        "difference"
    )


def test_messages_of_python() -> None:
    source = """
def f(size):
    try:
        raise ValueError(f"f: size is {size!r}, " "expected 1" + (" or 2" if size else ""))
    except ValueError:
        raise
    raise OSError(3, "no", size) from None
    raise stored
"""
    assert list(python_messages(source)) == [
        "OSError: {3}, no, {size}",
        "ValueError: f: size is {size}, expected 1{ or 2|}",
    ]


def test_messages_of_cpp() -> None:
    source = r"""
#define DYNEMB_CHECK(condition, ...) nothing
// DYNEMB_CHECK(false, "a comment");
DYNEMB_CHECK(a(b, c) && d == ',', "op: \"a\" is ", f(1, 2),
                ", expected (", 2, "): " "one");
DYNEMB_CHECK(fine);
"""
    assert list(cpp_messages(source)) == ['op: "a" is {f(1, 2)}, expected ({2}): one']


def test_whole_sources_are_read() -> None:
    messages = error_messages()
    for known in (
        "dynemb::{op}: {name} is None, expected a tensor",
        "ValueError: Uniform: low is {self.low}, expected at most high = {self.high}",
        "torch_dynemb/plan/streams.py",
        "csrc/cuda/runtime/launch.cu",
    ):
        assert known in messages
    assert messages.count("\n    ") > 1000
