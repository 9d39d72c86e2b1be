"""The states that a power failure may leave: of small programs, all that differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import file_shim
import pytest
from crash_states import Change, CrashState, crash_states, read_log

pytestmark = pytest.mark.cpu_only("files, and no tables")

OLD, NEW = b"o" * 3000, b"n" * 3000

# Parts of programs that replace what the file "a" holds.
WRITE = """
new = os.open("a.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.pwrite(new, b"n" * 3000, 0)
"""
SYNC = "os.fsync(new)\n"
RENAME = 'os.rename("a.new", "a")\n'
SYNC_FOLDER = 'folder = os.open(".", os.O_RDONLY); os.fsync(folder)\n'


class Programs:
    """Runs programs in a folder that is logged, and gives what a failure may leave."""

    def __init__(self, tmp_path: Path) -> None:
        self.start, self.folder = tmp_path / "start", tmp_path / "folder"
        self._shim = tmp_path / "shim"
        for folder in (self.start, self.folder, self._shim):
            folder.mkdir()

    def holds(self, name: str, data: bytes) -> None:
        """What is there before a program."""
        for folder in (self.start, self.folder):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)

    def changes(self, program: str) -> list[Change]:
        subprocess.run(
            [sys.executable, "-S", "-E", "-c", f"import os\n{program}"],
            cwd=self.folder,
            env=file_shim.environment(self._shim, log=self.folder),
            check=True,
        )
        return read_log(self._shim / "changes.log", self.folder)

    def states(self, program: str, drawn: int = 20) -> list[CrashState]:
        return list(crash_states(self.changes(program), self.start, drawn=drawn))


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    made = Programs(tmp_path)
    made.holds("a", OLD)
    return made


def contents(states: list[CrashState], name: str) -> set[bytes | str | None]:
    return {state.files.get(name, "absent") for state in states}


def test_a_file_that_is_replaced_in_the_right_order_is_old_or_new(programs: Programs) -> None:
    changes = programs.changes(WRITE + SYNC + RENAME + SYNC_FOLDER)
    assert contents(list(crash_states(changes, programs.start, drawn=50)), "a") == {OLD, NEW}
    last = list(crash_states(changes, programs.start, prefixes=[len(changes)], drawn=50))
    assert [state.files for state in last] == [{"a": NEW}]


def test_without_a_sync_of_the_file_it_may_be_empty_or_torn(programs: Programs) -> None:
    found = contents(programs.states(WRITE + RENAME + SYNC_FOLDER), "a")
    assert {OLD, NEW, b""} < found
    torn = {data for data in found if isinstance(data, bytes)} - {OLD, NEW, b""}
    for data in torn:  # at a sector, from either side
        kept = len(data.lstrip(b"\0"))
        assert data in (NEW[: len(data)], bytes(3000 - kept) + NEW[:kept])
        assert (len(data) if data[0] else 3000 - kept) % 512 == 0
    assert torn


def test_without_a_sync_of_the_folder_the_old_one_may_come_back(programs: Programs) -> None:
    changes = programs.changes(WRITE + SYNC + RENAME)
    last = list(crash_states(changes, programs.start, prefixes=[len(changes)]))
    assert contents(last, "a") == {OLD, NEW}


def test_a_sync_covers_what_came_before_it_only(programs: Programs) -> None:
    states = programs.states(WRITE + SYNC + 'os.pwrite(new, b"x" * 512, 512)\n' + SYNC_FOLDER)
    later = NEW[:512] + b"x" * 512 + NEW[1024:]
    whole = [data for data in contents(states, "a.new") if isinstance(data, bytes)]
    ended = [state for state in states if state.prefix == max(s.prefix for s in states)]
    assert later in whole
    assert contents(ended, "a.new") <= {NEW, later, "absent"}


def test_a_sync_covers_nothing_that_was_written_while_it_ran() -> None:
    """With a log written by the test: it says when calls began."""

    def change(kind: int, at: int, begin: int, data: bytes = b"") -> Change:
        return Change(kind, "a", None, os.O_CREAT, 0, len(data), begin, at, data)

    changes = [change(9, 0, 0), change(1, 10, 10, b"1"), change(4, 20, 10)]
    states = list(crash_states(changes, prefixes=[3]))
    assert contents(states, "a") == {b"", b"1", "absent"}
    changes[-1] = change(4, 20, 20)
    states = list(crash_states(changes, prefixes=[3]))
    assert contents(states, "a") == {b"1", "absent"}


def test_names_survive_in_order(programs: Programs) -> None:
    program = "".join(f'os.mkdir("{name}")\n' for name in "bcdef")
    trees = {"".join(sorted(state.files)) for state in programs.states(program)}
    assert trees == {"a", "ab", "abc", "abcd", "abcde", "abcdef"}


def test_a_sync_of_any_folder_keeps_the_names_before_it(programs: Programs) -> None:
    changes = programs.changes(
        'os.mkdir("d"); os.mkdir("e"); f = os.open("d", os.O_RDONLY); os.fsync(f); os.mkdir("g")'
    )
    last = list(crash_states(changes, programs.start, prefixes=[len(changes)]))
    assert {"".join(sorted(state.files)) for state in last} == {"ade", "adeg"}


def test_folders_move_with_what_is_in_them(programs: Programs) -> None:
    program = (
        'os.mkdir("d"); os.mkdir("d/e"); f = os.open("d/e/f", os.O_WRONLY | os.O_CREAT);'
        'os.rename("d", "g"); os.write(f, b"1"); os.link("g/e/f", "h"); os.unlink("g/e/f");'
        'os.unlink("a"); os.rmdir("g/e")'
    )
    states = programs.states(program)
    everything = [state for state in states if state.what == "everything"]
    assert everything[-1].files == {"g": None, "h": b"1"}
    assert {"g": None, "g/e": None, "g/e/f": b"1", "a": OLD} in [s.files for s in everything]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("os.ftruncate(f, 1000)", OLD[:1000]),
        ("os.ftruncate(f, 4000)", OLD + bytes(1000)),
        ("os.posix_fallocate(f, 2000, 3000)", OLD + bytes(2000)),
        ("os.close(os.open('a', os.O_WRONLY | os.O_TRUNC))", b""),
        ("os.pwrite(f, b'x', 5000)", OLD + bytes(2000) + b"x"),
    ],
)
def test_what_changes_a_size_survives_or_not(
    programs: Programs, call: str, expected: bytes
) -> None:
    changes = programs.changes(f'f = os.open("a", os.O_RDWR); {call}; os.fdatasync(f)')
    assert (programs.folder / "a").read_bytes() == expected
    assert contents(list(crash_states(changes, programs.start)), "a") == {OLD, expected}
    last = list(crash_states(changes, programs.start, prefixes=[len(changes)]))
    assert contents(last, "a") == {expected}


def test_the_state_of_a_killed_process_is_what_is_there(programs: Programs, tmp_path: Path) -> None:
    """Whatever it did; and states are written as they are described."""
    program = WRITE + RENAME + 'os.mkdir("d"); os.pwrite(new, b"1", 5000); os.ftruncate(new, 6000)'
    states = programs.states(program)
    killed = next(state for state in reversed(states) if state.what == "everything")
    (tmp_path / "written").mkdir()
    killed.write(tmp_path / "written")

    def tree(folder: Path) -> dict[Path, bytes | None]:
        return {
            path.relative_to(folder): path.read_bytes() if path.is_file() else None
            for path in folder.rglob("*")
        }

    assert tree(tmp_path / "written") == tree(programs.folder)
    assert str(killed).endswith("everything")


def test_states_differ_and_are_the_same_again(programs: Programs) -> None:
    changes = programs.changes(WRITE + RENAME + SYNC_FOLDER)

    def trees(**options: int) -> list[str]:
        return [repr(s.files) for s in crash_states(changes, programs.start, **options)]

    assert trees(drawn=20) == trees(drawn=20)
    assert len(set(trees(drawn=20))) == len(trees(drawn=20))
    assert set(trees(drawn=20)) != set(trees(drawn=20, seed=1))


def test_a_log_that_ends_in_a_record_is_read_up_to_it(programs: Programs, tmp_path: Path) -> None:
    changes = programs.changes(WRITE)
    log = tmp_path / "shim" / "changes.log"
    log.write_bytes(log.read_bytes()[:-1])
    assert read_log(log, programs.folder) == changes[:-1]


def test_what_comes_from_elsewhere_is_refused(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"1")
    changes = programs.changes('os.rename("../outside", "in")')
    with pytest.raises(ValueError, match="rename None in: what comes from another folder"):
        list(crash_states(changes, programs.start))
