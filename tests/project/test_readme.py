"""README.md: its example runs as it stands, what it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import torch_dynemb

pytestmark = pytest.mark.cpu_only("examples, which name no device")

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
ROOMS = ("recis", "oneembedding", "checkpoint", "serving")
WITH_EXAMPLES = [TEXT, *((ROOT / f"torch_dynemb/{room}/README.md").read_text() for room in ROOMS)]


def python_blocks() -> list[str]:
    return [
        block
        for text in WITH_EXAMPLES
        for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


@pytest.mark.parametrize(
    "block", [block for block in python_blocks() if 'device="cuda"' not in block]
)
def test_the_examples_run(tmp_path: Path, block: str) -> None:
    script = tmp_path / "example.py"
    script.write_text(block)
    warnings = [] if "torchrec" in block else ["-W", "error"]  # TorchRec itself has some
    result = subprocess.run(
        [sys.executable, *warnings, str(script)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_the_example_is_short() -> None:
    lines = [line for line in python_blocks()[0].splitlines() if line.strip()]
    assert len(lines) <= 16


def test_names_of_the_package_exist() -> None:
    for name in re.findall(r"`td\.(\w+)", TEXT):
        assert hasattr(torch_dynemb, name), f"README.md names td.{name}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", TEXT))
    assert named
    assert named <= targets


def test_directories_exist() -> None:
    section = TEXT.split("## Where things are", 1)[1]
    for directory in re.findall(r"^ {4}([\w./]+/)\s", section, re.MULTILINE):
        assert (ROOT / directory).is_dir(), directory
