"""tests/tools/code_lines.py: what counts as code, and as an import between rooms."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("reads sources")

TOOLS = Path(__file__).resolve().parents[1] / "tools"
SOURCE = '''"""A docstring
of two lines."""

import pack.b.deep  # a comment behind code

# a comment
text = """not a

docstring"""


def f():
    """One line."""
    return text
'''


def test_lines_and_arrows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import code_lines

    package = tmp_path / "pack"
    (package / "b").mkdir(parents=True)
    (package / "__init__.py").write_text("from pack import a\n")
    (package / "a.py").write_text(SOURCE)
    (package / "b" / "__init__.py").write_text("")
    (package / "b" / "deep.py").write_text("from pack.b import x\nfrom pack import a\n\n")
    rooms = code_lines.rooms_of(package)
    assert rooms == {
        "__init__": (1, 1, 1, {"a"}),
        "a": (1, 6, 14, {"b"}),
        "b": (2, 2, 3, {"a"}),
    }
    assert code_lines.table(rooms).splitlines()[-1].split() == [
        *("in", "all", "4", "9", "18", "2", "arrows", "between", "rooms")
    ]
