"""Count the lines of code of a package by room, its modules, and imports between rooms.

    python tests/tools/code_lines.py [PACKAGE]    torch_dynemb, or the folder of a package

A line of code is one that has a token of code: no docstring, no comment, no blank line. A room is a
module or a folder of the package; an arrow is a room that imports another one.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


class Room(NamedTuple):
    """What a room has.

    Attributes:
        modules: number of files.
        code: lines of code.
        lines: all of them.
        imports: the other rooms that it imports.
    """

    modules: int
    code: int
    lines: int
    imports: set[str]


def docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of the docstrings of a module, its classes and functions."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            found.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return found


def code_lines(source: str) -> int:
    """Lines that have code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(source)))


def imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Modules of a package that a module imports, relative to it."""
    start = f"{package}."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix(start) for a in node.names if a.name.startswith(start))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == package:
                yield from (name.name for name in node.names)
            elif node.module.startswith(start):
                yield node.module.removeprefix(start)


def rooms_of(folder: Path) -> dict[str, Room]:
    """The rooms of a package by name; ``__init__`` is the package itself."""
    files: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        files[path.relative_to(folder).with_suffix("").parts[0]].append(path)
    rooms = {}
    for name, paths in sorted(files.items()):
        sources = [path.read_text() for path in paths]
        to = {
            module.partition(".")[0]
            for source in sources
            for module in imported(ast.parse(source), folder.name)
        }
        rooms[name] = Room(
            len(paths),
            sum(map(code_lines, sources)),
            sum(len(source.splitlines()) for source in sources),
            to & files.keys() - {name},
        )
    return rooms


def table(rooms: dict[str, Room]) -> str:
    """A line for each room, and their sum."""
    lines = [f"{'room':18}{'modules':>9}{'code':>9}{'lines':>9}  imports"]
    for name, room in rooms.items():
        imports = " ".join(sorted(room.imports))
        lines.append(f"{name:18}{room.modules:9}{room.code:9}{room.lines:9}  {imports}".rstrip())
    arrows = sum(len(room.imports) for name, room in rooms.items() if name != "__init__")
    sums = (sum(getattr(room, field) for room in rooms.values()) for field in Room._fields[:3])
    modules, code, all_lines = sums
    lines.append(f"{'in all':18}{modules:9}{code:9}{all_lines:9}  {arrows} arrows between rooms")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", type=Path, nargs="?", default=ROOT / "torch_dynemb")
    folder = parser.parse_args().package.resolve()
    if not (folder / "__init__.py").is_file():
        parser.error(f"{folder} is not a package: it has no __init__.py")
    print(table(rooms_of(folder)))


if __name__ == "__main__":
    main()
