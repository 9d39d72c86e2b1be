"""``make docs``: the site has every page and every public name, and no link in it is broken."""

from __future__ import annotations

import importlib
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.cpu_only("a program, in a process of its own")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FIRST_PAGE = """# First page

[a folder](folder), [a source](folder/program.py), [a page](folder/page.md#its-second-part) and
{links}

```{{eval-rst}}
:class:`torch_dynemb.table.group.TableGroup`, :func:`{name}`
```
"""


@pytest.fixture(scope="module")
def conf() -> dict[str, Any]:
    pytest.importorskip("sphinx")
    return runpy.run_path(str(DOCS / "conf.py"))


def listed(contents: str) -> list[str]:
    """Names and patterns of pages in the site's navigation."""
    blocks = re.findall(r"^```\{toctree\}\n(.*?)^```$", contents, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    entries = [line for line in lines if line and not line.startswith(":")]
    return [re.sub(r".*<(.+)>$", r"\1", entry) for entry in entries]


def test_the_navigation_has_every_page() -> None:
    matching = pytest.importorskip("sphinx.util.matching")
    tracked = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    pages = {page.removesuffix(".md") for page in tracked} - {"README", "docs/contents"}
    patterns = listed((DOCS / "contents.md").read_text())
    found = {pattern: set(matching.patfilter(pages, pattern)) for pattern in patterns}
    assert [pattern for pattern, matches in found.items() if not matches] == []
    assert pages - set().union(*found.values()) == set()


def test_the_reference_has_every_public_module(conf: dict[str, Any]) -> None:
    from test_documentation import PACKAGES

    assert set(conf["MODULES"]) == set(PACKAGES)
    for module in PACKAGES:
        names = [name for names in conf["HERE"][module].values() for name in names]
        names += [page.rpartition(".")[2] for page in conf["ELSEWHERE"][module]]
        public = importlib.import_module(module)
        of_modules = [n for n in public.__all__ if isinstance(getattr(public, n), ModuleType)]
        assert sorted(names + of_modules) == sorted(public.__all__)


def test_references_find_the_page_of_a_name(conf: dict[str, Any]) -> None:
    find = conf["public_name"]
    assert find("torch_dynemb.TableGroup.remove") == "torch_dynemb.TableGroup.remove"
    assert find("torch_dynemb.table.group.TableGroup.remove") == "torch_dynemb.TableGroup.remove"
    assert find("torch_dynemb.table.removal.remove") is None
    with pytest.raises(AttributeError):
        find("torch_dynemb.TableGroup.statistics")


def build(source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as ``make docs`` does."""
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-c", str(source / "docs")]
    command = [sys.executable, "-m", "sphinx", *options, "-d", str(output / "doctrees")]
    return subprocess.run(
        [*command, str(source), str(output / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def small_repository(folder: Path, links: str, name: str) -> Path:
    """Write a repository of two pages, with our configuration and no reference."""
    shutil.copytree(DOCS, folder / "docs")
    (folder / "docs" / "reference.md").write_text("# Reference\n")
    contents = "```{toctree}\nfolder/page\ndocs/reference\n```\n"
    (folder / "docs" / "contents.md").write_text(contents)
    (folder / "README.md").write_text(FIRST_PAGE.format(links=links, name=name))
    (folder / "folder").mkdir()
    (folder / "folder" / "program.py").write_text("print()\n")
    (folder / "folder" / "page.md").write_text("# A page\n\n## Its second part\n\nText.\n")
    return folder


@pytest.mark.page
def test_links_of_every_kind_are_built(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    source = small_repository(tmp_path / "source", "no more", "torch_dynemb.freeze")
    result = build(source, tmp_path)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    assert 'href="folder/page.html#its-second-part"' in page


@pytest.mark.page
def test_links_that_lead_nowhere_fail(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    links = "[none](folder/none.md), [no part](folder/page.md#its-third-part)"
    source = small_repository(tmp_path / "source", links, "torch_dynemb.frozen_copy")
    result = build(source, tmp_path)
    assert result.returncode != 0
    for wrong in ("folder/none.md", "its-third-part", "torch_dynemb.frozen_copy"):
        assert wrong in result.stderr
    assert result.stderr.count("WARNING") == 3, result.stderr


@pytest.mark.long
def test_the_site_has_every_public_name(conf: dict[str, Any], tmp_path: Path) -> None:
    result = build(ROOT, tmp_path)
    assert result.returncode == 0, result.stderr
    reference = tmp_path / "site" / "build" / "reference"
    for module, groups in conf["HERE"].items():
        overview = (reference / f"{module}.html").read_text()
        for name in (f"{module}.{name}" for names in groups.values() for name in names):
            assert f'href="{name}.html' in overview, name
            assert f'id="{name}"' in (reference / f"{name}.html").read_text(), name
    index = (tmp_path / "site" / "searchindex.js").read_text()
    assert "tutorials/guides/policies" in index
    assert "torch_dynemb.ops.find_or_insert_" in index
