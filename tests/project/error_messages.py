"""Every error message of the package and of its library in one list, to be read by people.

    python tests/project/error_messages.py            # prints the list
    python tests/project/error_messages.py --write    # writes it to error_messages.txt

Messages of Python are those of ``raise`` statements, those of C++ those of ``DYNEMB_CHECK``.
What a message says of values stands in braces, as the source has it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("error_messages.txt")
CHECK = re.compile(r"DYNEMB_CHECK\(")
HEAD = (
    "Every error message, by file. Written by `python tests/project/error_messages.py --write`.\n"
    "A message should name the argument, the value and the remedy.\n"
)


def python_messages(source: str) -> Iterator[str]:
    """``Type: message`` of each raise statement; what is raised again has no message."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind = ast.unparse(node.exc.func)
            texts = [_text(argument) for argument in node.exc.args]
            yield f"{kind}: {', '.join(texts)}"


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


def cpp_messages(source: str) -> Iterator[str]:
    """The message of each check: what follows its condition."""
    code = re.sub(r"//[^\n]*", "", source)
    for check in CHECK.finditer(code):
        is_definition = code[: check.start()].rstrip().endswith("#define")
        parts = _arguments(code, check.end())
        if not is_definition and len(parts) > 1:
            yield "".join(_cpp_text(part) for part in parts[1:])


def _arguments(code: str, begin: int) -> list[str]:
    """The arguments of a call whose bracket opens before ``begin``."""
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


def error_messages() -> str:
    """The whole list."""
    files = dict.fromkeys((ROOT / "torch_dynemb").rglob("*.py"), python_messages)
    for suffix in ("cpp", "h", "cu", "cuh"):
        files |= dict.fromkeys((ROOT / "csrc").rglob(f"*.{suffix}"), cpp_messages)
    parts = [HEAD]
    for path in sorted(files):
        if messages := sorted(set(files[path](path.read_text()))):
            name = path.relative_to(ROOT).as_posix()
            parts.append("\n".join([name, *(f"    {message!s}" for message in messages)]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    if "--write" in sys.argv:
        LIST.write_text(error_messages())
    else:
        print(error_messages(), end="")
