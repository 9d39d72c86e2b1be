"""Rules for error messages, checked in the sources of the package and of its library.

    python tests/project/error_messages.py            # prints every message by file, to be read

Messages of Python are those of exceptions that are made, those of C++ those of ``DYNEMB_CHECK``.
What a message says of values stands in braces, as the source has it. A message

1. names something: a value, an argument, an option or a function;
2. begins with its owner: the op, function, option or argument that it is about;
3. says what was expected, what is in the way, or what to do;
4. has no word that says nothing, such as "invalid".

What is said of the content of a file needs neither 2 nor 3: the function that read the file adds
its path, and nothing but another file helps.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CHECK = re.compile(r"DYNEMB_CHECK\(")
EXPECTS = re.compile(
    r"expected|\bbut\b|\bmust\b|\bcannot\b|, so |: |; |\. [A-Z]|, (with )?which |\btwice\b"
    r"|\balready\b"
)
NO_OWNER = re.compile(r"(it|its|a|an|the|this|these|there|no|not|whether|cannot|could)\b")
NAMES = re.compile(
    r"\{\}|\w_\w|\w\(|--\w|dynemb::|\w\.\w|'\w+'"  # a value, or what only code has
    r"|^\w+: \w+ (is|has|was|does)\b"  # an argument
)
VAGUE = re.compile(r"\b(invalid|illegal|bad|please|oops|error occurred)\b", re.I)


class Message(NamedTuple):
    """What an error says.

    Attributes:
        line: of the source, from 1.
        kind: the exception, or the function that makes one; "" in C++.
        text: values are in braces.
    """

    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.kind else self.text


def python_messages(source: str) -> Iterator[Message]:
    """Those of each raise statement, and of exceptions that are returned or passed on."""
    tree = ast.parse(source)
    raised = {
        id(node.exc)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        kind = ast.unparse(node.func)
        if id(node) in raised or (re.search(r"\w(Error|Exception)$", kind) and node.args):
            texts = [_text(argument) for argument in node.args]
            yield Message(node.lineno, kind, ", ".join(texts))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{_source(part.value)}}}" if isinstance(part, ast.FormattedValue) else _text(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{{{_text(node.body)}|{_text(node.orelse)}}}"
    return f"{{{_source(node)}}}"


def _source(node: ast.expr) -> str:
    return " ".join(ast.unparse(node).split())


def cpp_messages(source: str) -> Iterator[Message]:
    """The message of each check: what follows its condition."""
    code = re.sub(r"//[^\n]*", "", source)
    for check in CHECK.finditer(code):
        is_definition = code[: check.start()].rstrip().endswith("#define")
        parts = _arguments(code, check.end())
        if not is_definition and len(parts) > 1:
            line = code.count("\n", 0, check.start()) + 1
            yield Message(line, "", "".join(_cpp_text(part) for part in parts[1:]))


def _arguments(code: str, begin: int) -> list[str]:
    """Return the arguments of a call; its bracket opens before ``begin``."""
    parts, depth, start, at = [], 0, begin, begin
    while True:
        letter = code[at]
        if letter in "\"'":
            at = re.compile(rf"(?:[^\\{letter}]|\\.)*").match(code, at + 1).end()  # type: ignore[union-attr]
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if depth < 0:
                return [*parts, code[start:at]]
        elif letter == "," and depth == 0:
            parts.append(code[start:at])
            start = at + 1
        at += 1


def _cpp_text(argument: str) -> str:
    argument = " ".join(argument.split())
    if re.fullmatch(r'(?:"(?:[^"\\]|\\.)*" ?)+', argument):
        return "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', argument)).replace('\\"', '"')
    return f"{{{argument}}}"


def without_values(text: str) -> str:
    """A message with {} in place of each value."""
    kept, depth = "", 0
    for letter in text:
        depth -= letter == "}"
        if depth == 0:
            kept += letter
        depth += letter == "{"
    return kept


def faults(message: Message, *, of_files: bool = False) -> list[str]:
    """What is wrong with a message.

    Args:
        of_files: what it says is about the content of a file.
    """
    text = without_values(message.text)
    found = []
    if message.kind and not re.search(r"(Error|Exception)$", message.kind):
        return []  # a function that makes the exception: its own message is checked
    if not (NAMES.search(text) or (of_files and text.startswith(("it ", "its ")))):
        found.append("names no value, argument, option or function")
    if vague := VAGUE.search(text):
        found.append(f"says nothing by {vague[0]!r}")
    if of_files:
        return found
    if NO_OWNER.match(text) or not text:
        found.append("does not begin with what it is about")
    rest = re.sub(r"^[^ ]*(\{\}[^ ]*)*: ", "", text, count=1)
    if not EXPECTS.search(rest):
        found.append("says neither what was expected nor what to do")
    return found


@cache
def all_messages() -> dict[Path, list[Message]]:
    """By file, within the repository."""
    files = dict.fromkeys((ROOT / "torch_dynemb").rglob("*.py"), python_messages)
    for suffix in ("cpp", "h", "cu", "cuh"):
        files |= dict.fromkeys((ROOT / "csrc").rglob(f"*.{suffix}"), cpp_messages)
    return {
        path.relative_to(ROOT): messages
        for path in sorted(files)
        if (messages := list(files[path](path.read_text())))
    }


if __name__ == "__main__":
    for path, messages in all_messages().items():
        print(path, *(f"    {message.line}: {message}" for message in messages), sep="\n")
