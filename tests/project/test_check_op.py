"""``make check OP=name``: an op has tests of every kind, and one that is missing is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from op_cases import FAMILIES

import torch_dynemb  # noqa: F401  # registers the ops
from torch_dynemb._library.op_names import op_names

pytestmark = pytest.mark.cpu_only("a program, in a process of its own")

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = TESTS / "tools" / "check_op.py"


def check_op(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_op_that_is_not_there_is_told_near_names() -> None:
    reply = check_op("find_or_insert")
    assert reply.returncode == 1
    assert "OP=find_or_insert: no op of that name. Near names: find_or_insert_" in reply.stderr


def test_an_op_is_checked() -> None:
    reply = check_op("id_owners")
    assert reply.returncode == 0, reply.stdout
    summary = reply.stdout.partition("\nid_owners:\n")[2].splitlines()
    kinds = {line[:18].strip(): int(line[18:23]) for line in summary[:5]}
    assert kinds.keys() == {"schema", "opcheck", "wrong arguments", "values", "emulator"}
    assert all(count > 0 for count in kinds.values())
    assert "300 damaged calls" in reply.stdout


def test_a_kind_without_a_test_is_an_error_that_says_where_to_add_it() -> None:
    reply = check_op("id_owners", "-k", "test_schemas")
    assert reply.returncode == 1
    assert (
        "id_owners has no test of values: add a test that calls it to tests/ops/test_routing.py"
        in (reply.stdout)
    )


def test_every_op_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    import check_op as program

    for name in op_names():
        op = program.Op(name)
        assert op.values, name
        assert [path for path in op.files() if not path.is_file()] == []
    named = [name for family, _ in FAMILIES.values() for name in family]
    assert len(named) == len(set(named))
