"""Every test file says where it runs; one that does not is an error with every --device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from declared_device import declared_kind

pytestmark = pytest.mark.cpu_only("files, which are the same for all devices")

TESTS = Path(__file__).resolve().parents[1]


def test_every_test_file_says_where_it_runs() -> None:
    assert [file.name for file in TESTS.rglob("test_*.py") if declared_kind(file) is None] == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("pytestmark = pytest.mark.any_device", "any_device"),
        ("pytestmark = [pytest.mark.own_device, pytest.mark.cuda]", "own_device"),
        ("pytestmark = pytest.mark.cpu_only('why')", "cpu_only"),
        ("pytestmark = pytest.mark.cpu_only", None),  # without a reason
        ("pytestmark = pytest.mark.cpu_only()", None),
        ("pytestmark = [pytest.mark.any_device, pytest.mark.own_device]", None),
        ("pytestmark = pytest.mark.long", None),
        ("", None),
        ("def test_one():\n    pytestmark = pytest.mark.any_device", None),
    ],
)
def test_what_a_file_says(text: str, kind: str | None, tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(text)
    assert declared_kind(file) == kind


@pytest.mark.parametrize("device", ["cpu", "emulated", "marked"])
def test_a_file_that_says_nothing_is_an_error(device: str, tmp_path: Path) -> None:
    (tmp_path / "test_forgotten.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "test_here.py").write_text(
        "import pytest\npytestmark = pytest.mark.any_device\ndef test_one(): pass\n"
    )
    settings = TESTS.parent / "pyproject.toml"
    options = ["-c", str(settings), "-p", "conftest", "-p", "no:cacheprovider", "--collect-only"]
    command = [sys.executable, "-m", "pytest", *options, "-q"]
    reply = subprocess.run(
        [*command, "--device", device, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert reply.returncode == pytest.ExitCode.INTERRUPTED, reply.stdout + reply.stderr
    assert "test_forgotten.py says not where it runs" in reply.stdout
    assert "1 test collected, 1 error" in reply.stdout
