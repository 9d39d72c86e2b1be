"""Hooks of git and hosted CI call targets that the Makefile has, and those that .ci/run calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("reads configuration")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
HOOKS = ROOT / ".pre-commit-config.yaml"


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def called_by_workflow() -> set[str]:
    text = WORKFLOW.read_text()
    called = set(re.findall(r"run: make ([a-z-]+)", text))
    for entries in re.findall(r"target: \[(.*)\]", text):
        called |= {entry.split()[0] for entry in entries.split(",")}
    return called


def test_the_workflow_calls_what_ci_runs() -> None:
    (loop,) = re.findall(r"^for target in (.*); do$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert called_by_workflow() == set(loop.split())
    assert called_by_workflow() <= targets()
    assert len(re.findall(r"run:", WORKFLOW.read_text())) == WORKFLOW.read_text().count("run: make")


def test_hooks_call_targets() -> None:
    entries = re.findall(r"entry: (.*)", HOOKS.read_text())
    called = {entry.removeprefix("make ") for entry in entries}
    assert called == {"format", "lint"}
    assert called <= targets()


def test_the_workflow_has_no_secret_and_pins_actions() -> None:
    text = WORKFLOW.read_text()
    assert "secrets" not in text
    assert "contents: read" in text
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@v\d+(\.\d+)*", action)] == []


def test_the_matrix_begins_with_the_oldest_python() -> None:
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    (matrix,) = re.findall(r"python: \[(.*)\]", WORKFLOW.read_text())
    assert matrix.split(", ")[0] == f'"{oldest}"'
