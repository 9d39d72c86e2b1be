"""README.md and all other pages: their examples run as they stand, what they name exists."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from started import start_server

import torch_dynemb

pytestmark = pytest.mark.cpu_only("examples, which name no device")

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
PACKAGE = ROOT / "torch_dynemb"
PAGES = [
    page
    for page in (
        ROOT / "README.md",
        *sorted(PACKAGE.rglob("*.md")),
        ROOT / "tutorials/concepts.md",
        *sorted((ROOT / "tutorials/migrate").glob("*.md")),
        *sorted((ROOT / "tutorials/guides").glob("*.md")),
    )
    if "```python" in page.read_text()
]
NEEDS_GPU = 'device="cuda"'


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def programs() -> list[tuple[str, str]]:
    """Examples, with the page and number of each: one that imports torch begins a program, and one
    that does not goes on with the program before it. `# needs PACKAGE` is the first line of a
    program for a package that tests need not have."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        blocks = [block for block in python_blocks(page) if NEEDS_GPU not in block]
        starts = [n for n, block in enumerate(blocks) if "import torch\n" in block]
        assert starts[:1] == ([0] if blocks else []), f"{page}: the first example imports nothing"
        for number, begin in enumerate(starts):
            end = [*starts, len(blocks)][number + 1]
            name = f"{page.relative_to(ROOT)}-{begin + 1}"
            found.append((name, "\n".join(blocks[begin:end])))
    return found


PROGRAMS = dict(programs())


@pytest.mark.page
def test_the_first_example_runs_in_a_fresh_process(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(PROGRAMS["README.md-1"])
    result = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


def run_program(script: Path, output: Path) -> None:
    os.chdir(script.parent)
    if "torchrec" not in script.read_text():  # which has some warnings itself
        warnings.simplefilter("error")
        # torchdata 0.11 calls it
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
    with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except BaseException:
            traceback.print_exc()
            raise


@pytest.mark.page
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "README.md-1"])
def test_the_examples_run(tmp_path: Path, name: str) -> None:
    needs = re.match(r"# needs (\w+)\n", PROGRAMS[name])
    if needs and importlib.util.find_spec(needs[1]) is None:
        compile(PROGRAMS[name], name, "exec")
        return
    script, output = tmp_path / "example.py", tmp_path / "output.txt"
    script.write_text(PROGRAMS[name])
    process = start_server().Process(target=run_program, args=(script, output))
    process.start()
    process.join(120)
    assert process.exitcode == 0, output.read_text()
    assert output.read_text()


def test_links_lead_somewhere() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for page in map(ROOT.joinpath, tracked):
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            if "://" in path:
                continue
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.relative_to(ROOT)} leads to {target}"
            if anchor:
                assert anchor in anchors(file), f"{page.relative_to(ROOT)} leads to {target}"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 100


def test_the_example_is_short() -> None:
    lines = [line for line in python_blocks(ROOT / "README.md")[0].splitlines() if line.strip()]
    assert len(lines) <= 16


def test_names_of_the_package_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`td\.(\w+)", page.read_text()):
            assert hasattr(torch_dynemb, name), f"{page.relative_to(ROOT)} names td.{name}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", TEXT))
    assert named
    assert named <= targets
