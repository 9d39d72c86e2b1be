"""Every test file says where it runs; one that does not is an error with every --device."""

from __future__ import annotations

import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from declared_device import declared_kind
from started import start_server

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


def collect(folder: Path, device: str, output: Path) -> None:
    """Collects the tests of a folder; ends the process with the exit code of pytest."""
    sys.path.insert(0, str(TESTS))  # folders have a conftest, too
    options = ["-c", str(TESTS.parent / "pyproject.toml"), "-p", "conftest"]
    options += ["-p", "no:cacheprovider", "--collect-only", "-q", "--device", device]
    with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        code = pytest.main([*options, str(folder)])
    sys.exit(code)


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "marked", "emulated"])
def test_a_file_that_says_nothing_is_an_error(device: str, tmp_path: Path) -> None:
    folder, output = tmp_path / "tests", tmp_path / "output.txt"
    folder.mkdir()
    (folder / "test_forgotten.py").write_text("raise RuntimeError('imported')\n")
    (folder / "test_here.py").write_text(
        "import pytest\npytestmark = pytest.mark.any_device\ndef test_one(): pass\n"
    )
    process = start_server().Process(target=collect, args=(folder, device, output))
    process.start()
    process.join(120)
    said = output.read_text()
    assert process.exitcode == pytest.ExitCode.INTERRUPTED, said
    assert "test_forgotten.py says not where it runs" in said
    assert "1 test collected, 1 error" in said
