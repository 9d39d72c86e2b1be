"""``make check OP=name``: an op has tests of every kind, and one that is missing is named."""

from __future__ import annotations

import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from op_cases import FAMILIES
from started import start_server

import torch_dynemb  # noqa: F401  # registers the ops
from torch_dynemb._library.op_names import op_names

pytestmark = pytest.mark.cpu_only("a program, in a process of its own")

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = TESTS / "tools" / "check_op.py"


def run_program(arguments: tuple[str, ...], output: Path) -> None:
    sys.argv = [str(PROGRAM), *arguments]
    with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        runpy.run_path(str(PROGRAM), run_name="__main__")


def check_op(folder: Path, *arguments: str) -> tuple[int | None, str]:
    """Runs the program; returns its exit status and what it printed."""
    output = folder / "output.txt"
    process = start_server().Process(target=run_program, args=(arguments, output))
    process.start()
    process.join(240)
    return process.exitcode, output.read_text()


def test_an_op_that_is_not_there_is_told_near_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    import check_op as program

    near = r"OP=find_or_insert: no op of that name\. Near names: find_or_insert_"
    with pytest.raises(SystemExit, match=near):
        program.Op("find_or_insert")


@pytest.mark.long
def test_an_op_is_checked(tmp_path: Path) -> None:
    status, said = check_op(tmp_path, "id_owners")
    assert status == 0, said
    summary = said.partition("\nid_owners:\n")[2].splitlines()
    kinds = {line[:18].strip(): int(line[18:23]) for line in summary[:5]}
    assert kinds.keys() == {"schema", "opcheck", "wrong arguments", "values", "emulator"}
    assert all(count > 0 for count in kinds.values())
    assert "300 damaged calls" in said


@pytest.mark.long
def test_a_kind_without_a_test_is_an_error_that_says_where_to_add_it(tmp_path: Path) -> None:
    status, said = check_op(tmp_path, "id_owners", "-k", "test_schemas")
    assert status == 1
    wanted = (
        "id_owners has no test of values: add a test that calls it to tests/ops/test_routing.py"
    )
    assert wanted in said


def test_every_op_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    import check_op as program

    for name in op_names():
        op = program.Op(name)
        assert op.values, name
        assert [path for path in op.files() if not path.is_file()] == []
    named = [name for family, _ in FAMILIES.values() for name in family]
    assert len(named) == len(set(named))
