"""tests/tools/prose.py: what it finds in texts, and what it lets pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("reads sources")

TOOLS = Path(__file__).resolve().parents[1] / "tools"


def found(path: str, text: str) -> list[tuple[int, str]]:
    """Lines and rules of what is found in a file."""
    sys.path.insert(0, str(TOOLS))
    try:
        import prose
    finally:
        sys.path.remove(str(TOOLS))
    return [(finding.line, finding.rule) for finding in prose.findings(path, text)]


@pytest.mark.parametrize(
    "text",
    [
        "Rows whose ids are gone",
        "# who has no row",
        "// nobody waits",
        "There is no table of this name",
        "an optimizer that there is not",
        "the caller is told",
        "it is\n    // no row",
    ],
)
def test_words(text: str) -> None:
    assert found("csrc/a.h", text) == [(1, "words")]


@pytest.mark.parametrize(
    "text",
    [
        "an id is no longer there",
        "there is not enough memory",
        "the row that is not there",
        "the rows are no more than these",
        "if x is not None:",
        "whole, wholesale",
    ],
)
def test_words_that_pass(text: str) -> None:
    assert found("csrc/a.h", text) == []


def test_long_sentences() -> None:
    long = "word " * 31
    assert found("a.md", f"# {long}\n\nShort. {long}and\nmore. Short.\n") == [(3, "length")]
    assert (
        found("a.md", f"```\n{long}\n```\n| {long} |\n* {'word ' * 20}\n* {'word ' * 20}\n") == []
    )
    assert found("a.md", f"{'word ' * 20}`{long}` [text]({long.replace(' ', '')})\n") == []
    text = f'"""Title.\n\n{long}\n\nExample::\n\n    {long}\n"""\n'
    assert found("torch_dynemb/a.py", text) == [(3, "length")]
    assert found("tests/a.py", text) == []


FUNCTION = 'def f():\n    """{} of rows."""\n'


@pytest.mark.parametrize("word", ["What", "Returns", "The number", "Whether", "Ids", "As copies"])
def test_functions_begin_with_a_verb(word: str) -> None:
    assert found("torch_dynemb/a.py", FUNCTION.format(word)) == [(2, "verb")]
    assert found("tests/a.py", FUNCTION.format(word)) == []
    noun = "@property\n" + FUNCTION.format(word)
    assert found("benchmarks/a.py", noun) == []


def test_what_begins_well() -> None:
    assert found("torch_dynemb/a.py", FUNCTION.format("Return copies")) == []
    text = 'class A:\n    """Rows of a table."""\n\n    def __len__(self):\n        """Ids."""\n'
    assert found("torch_dynemb/a.py", text) == []


@pytest.mark.parametrize("word", ["What rows are", "How rows move", "Writes rows"])
def test_classes_begin_with_a_noun(word: str) -> None:
    assert found("torch_dynemb/a.py", f'class A:\n    """{word}."""\n') == [(2, "noun")]


def test_the_program_fails_where_something_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(TOOLS))
    try:
        import prose
    finally:
        sys.path.remove(str(TOOLS))
    assert prose.main([str(TOOLS.parents[1] / "tests/tools/code_lines.py")]) == 0
    assert capsys.readouterr().out == "0 places\n"
    assert len(prose.ALLOWED) <= 20
