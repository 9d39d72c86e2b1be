"""Every error message names an owner, a value and a remedy, as ``error_messages.py`` has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from error_messages import (
    Message,
    all_messages,
    cpp_messages,
    faults,
    python_messages,
    without_values,
)

pytestmark = pytest.mark.cpu_only("reads sources")

# Messages about the content of a file; the caller adds its path.
OF_FILES = (
    "torch_dynemb/checkpoint/",
    "torch_dynemb/changes/",
    "torch_dynemb/delta_log/",
    "torch_dynemb/files/",
    "torch_dynemb/parts/saved_checks.py",
    "torch_dynemb/table/score_check.py",
    "torch_dynemb/migrate/",
    "torch_dynemb/serving/packages/",
    "torch_dynemb/serving/frozen_state.py",
    "torch_dynemb/table/state_check.py",
    "torch_dynemb/table/state_entries.py",
    "torch_dynemb/oneembedding/oneflow_snapshot.py",
    "torch_dynemb/torchrec/state/saved_rows.py",
    "csrc/cpu/serving/row_file.cpp",
    "csrc/cpu/storage/collection.cpp",
    "csrc/cpu/storage/record_reader.cpp",
    "csrc/cpu/storage/record_log.cpp",
)
# Messages that need not keep a rule, without their values; each must be of some error.
COMPOSED = {  # the words are those of another message, or of a function that is called here
    "dynemb::{}{}{}",
    "dynemb::{}: {}",
    "dynemb: {}",
    "dynemb::{}: {} (found by the GPU in an earlier call, reported by {}){}",
    "{}",
    "{}: {}",
    "{} is {}, {}",
    "planning failed on rank 0:\n{}",
}
OF_THE_PROCESS = {  # no argument is wrong
    "the kernel makes no io_uring: {}",
    "whether the kernel allows io_uring is not known: {}",
    "torch_dynemb was built without liburing",
    "raised on rank {}",
    "RemoteTables: a lookup runs outside of a forward of its RemoteModel, or in another thread "
    "than it, so its rows may be of another commit: call the RemoteModel, and look up in the "
    "thread of its forward",
    "ExternalStore: another thread is looking these tables up, or prefetches: lookups of tables "
    "with a store change its cache, so call them one at a time",
    "missing: the package does not count ids that are not found: export the model with "
    "missing=True",
    "write: the writer is closed: make another one to write more",
}
BEGINS = (  # with the failure, not an argument
    "the system starts {} of {} threads",
    "a step of SGD moved the rows by {}",
    "the ExternalStore has failed before",
    "the standard input cannot be read as Parquet",
    "this process is a fork of the one that made the tables",
)
BETWEEN_TENSORS = {  # that only the library makes; what was expected is in the other tensor
    "dynemb::{}: state of slab {} has two tensors of steps",
    "dynemb::{}: state of slab {} has more than {} values per row",
    "dynemb::{}: state of slab {} has more than {} values per weight",
    "dynemb::{}: {} has a dtype that is not of 1, 2, 4 or 8 bytes",
    "dynemb::release_: rows {} to {} are not a range of the {} rows of tensor",
    "dynemb::{}: counts[{}] is {}, more than handles, ids, tables or gradients hold",
    "dynemb::empty: {} dimensions",
    "dynemb::empty: too large",
    "dynemb::{}: slots has fewer free ones than tier_clock says",
    "dynemb::{}: slab is {} of {} weights, {} generations and {} state tensors",
    "dynemb::{}: tables has {} elements and row_clock {}, more than the group has tables for",
    "dynemb::release_group: got {} table_buckets and {} slab_rows for {} tables and {} slabs",
    "dynemb::bind_group: got {} table_buckets, {} slab_rows, {} generations and {} state, {} "
    "dirty_bits and {} pending tensors for {} tables and {} slabs",
    "dynemb::{}: {} is not on the emulated device",
}
IN_OTHER_WORDS = {
    "{} is not a number of at least 1",
    "pg does not have this process as a member: construct it on members only",
    "ByColumn: a part is a ByColumn itself: write its parts out",
    "a key occurs twice",
    "module {} has no attribute {}",  # as Python says it
}
LISTED = COMPOSED | OF_THE_PROCESS | BETWEEN_TENSORS | IN_OTHER_WORDS


def is_listed(message: Message) -> bool:
    text = without_values(message.text)
    return text in LISTED or text.startswith(BEGINS)


@pytest.mark.long
def test_messages_name_owner_value_and_remedy() -> None:
    found = [
        f"{path}:{message.line}: {message}\n    {fault}"
        for path, messages in all_messages().items()
        for message in messages
        if not is_listed(message)
        for fault in faults(message, of_files=path.as_posix().startswith(OF_FILES))
    ]
    assert found == [], "\n".join(found)


def test_listed_messages_exist_and_need_it() -> None:
    given = [
        (without_values(message.text), faults(message))
        for messages in all_messages().values()
        for message in messages
    ]
    faulty = {text for text, found in given if found}
    assert LISTED - faulty == set()
    assert [begin for begin in BEGINS if not any(text.startswith(begin) for text in faulty)] == []
    files = [path.as_posix() for path in all_messages()]
    assert all(any(file.startswith(start) for file in files) for start in OF_FILES)


NAMES, OWNER, REMEDY = (
    "names no value, argument, option or function",
    "does not begin with what it is about",
    "says neither what was expected nor what to do",
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f: size is {size}, expected at least 1", []),
        ("{owner}: ids has dtype {given.dtype}, expected int64", []),
        ("dynemb::{op}: {name} is not contiguous: call .contiguous()", []),
        ("f: size is {size}", [REMEDY]),
        ("dynemb::{op}: ids is {ids}", [REMEDY]),
        ("f: size is wrong: give another one", []),
        ("wrong size", [NAMES, REMEDY]),
        ("", [NAMES, OWNER, REMEDY]),
        ("the size must be positive", [NAMES, OWNER]),
        ("it is {size}, expected 1", [OWNER]),
        ("f: invalid size {size}, expected 1", ["says nothing by 'invalid'"]),
    ],
)
def test_what_is_a_fault(text: str, expected: list[str]) -> None:
    assert faults(Message(1, "ValueError", text)) == expected


def test_content_of_files_needs_no_owner() -> None:
    assert faults(Message(1, "ValueError", "its header has {n} bytes"), of_files=True) == []
    assert faults(Message(1, "ValueError", "damaged"), of_files=True) == [NAMES]


def test_messages_of_python() -> None:
    source = """
def f(size):
    try:
        raise ValueError(f"f: size is {size!r}, " "expected 1" + (" or 2" if size else ""))
    except ValueError:
        raise
    raise OSError(3, "no", size) from None
    raise stored
    raise _wrong("f")
    return SizeError(f"f: size is {size}")
"""
    assert sorted(map(str, python_messages(source))) == [
        "OSError: {3}, no, {size}",
        "SizeError: f: size is {size}",
        "ValueError: f: size is {size}, expected 1{ or 2|}",
        "_wrong: f",
    ]


def test_messages_of_cpp() -> None:
    source = r"""
#define DYNEMB_CHECK(condition, ...) nothing
// DYNEMB_CHECK(false, "a comment");
DYNEMB_CHECK(a(b, c) && d == ',', "op: \"a\" is ", f(1, 2),
                ", expected (", 2, "): " "one");
DYNEMB_CHECK(fine);
"""
    assert list(cpp_messages(source)) == [
        Message(4, "", 'op: "a" is {f(1, 2)}, expected ({2}): one')
    ]


def test_whole_sources_are_read() -> None:
    messages = all_messages()
    assert {Path("torch_dynemb/plan/streams.py"), Path("csrc/cuda/runtime/launch.cu")} <= set(
        messages
    )
    told = [str(message) for of_file in messages.values() for message in of_file]
    assert "ValueError: Uniform: low is {self.low}, expected at most high = {self.high}" in told
    assert len(told) > 1000
