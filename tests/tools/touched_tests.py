"""Print the files with long tests that a change touches, the nearest first, one a line.

    python tests/tools/touched_tests.py [--base COMMIT] [--changed]

A file is near if few imports lead from it to a changed file. ``td.name`` counts as an import of the
module that defines ``name``, and a C++ source as the module of ``torch_dynemb/ops`` named as its
folder. ``--base`` is the commit before the change: ``DYNEMB_BASE``, or else the newest commit that
is older than four hours.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from declared_device import declared_kind  # noqa: E402

PACKAGE = "torch_dynemb"


def module_files() -> dict[str, Path]:
    """Return the file of each module that tests may import, by its name."""
    files = {}
    for folder in (PACKAGE, "benchmarks", "tutorials"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for path in sorted((ROOT / "tests").rglob("*.py")):
        inside = path.relative_to(ROOT / "tests").with_suffix("").parts
        files.setdefault(".".join(inside[:-1] if inside[-1] == "__init__" else inside), path)
        files.setdefault(path.stem, path)  # the folders of tests are on one path
    return files


FILES = module_files()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


@cache
def exported(module: str) -> dict[str, str]:
    """Return where a package takes its names from, by name."""
    names = {}
    for node in ast.walk(parsed(FILES[module])):
        if isinstance(node, ast.ImportFrom) and node.module in FILES:
            for alias in node.names:
                names[alias.asname or alias.name] = node.module
    return names


@cache
def imported_files(path: Path) -> frozenset[Path]:
    """Return the files that a file imports, without the package's own, which imports all."""
    return frozenset(FILES[name] for name in imports(path) if name in FILES and name != PACKAGE)


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports or names by attributes of the package."""
    tree = parsed(path)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = alias.name
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield defining(node.module, alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = names.get(node.value.id, "")
            if module.partition(".")[0] == PACKAGE:
                yield defining(module, node.attr)


@cache
def defining(module: str, name: str) -> str:
    """Return the module that defines ``name`` of ``module``."""
    if f"{module}.{name}" in FILES:
        return f"{module}.{name}"
    source = exported(module).get(name) if module in FILES else None
    return defining(source, name) if source and source != module else module


def distances(start: Path) -> dict[Path, int]:
    """Return the number of imports from a file to each that it reaches."""
    found = {start: 0}
    border = [start]
    while border:
        after = []
        for path in border:
            for other in imported_files(path):
                if other not in found:
                    found[other] = found[path] + 1
                    after.append(other)
        border = after
    return found


def changed_files(base: str) -> set[Path]:
    """Return the files that differ from a commit; C++ sources as the Python module of their ops."""
    command = ["git", "diff", "--name-only", "--no-renames", base]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    changed = set()
    for name in names.splitlines():
        path = ROOT / name
        if name.startswith("csrc/"):
            path = ROOT / PACKAGE / "ops" / f"{path.parent.name}.py"
            path = path if path.exists() else ROOT / PACKAGE / "_library" / "__init__.py"
        changed.add(path)
    return changed


def has_long_tests(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node).startswith("pytest.mark.long")
        for node in ast.walk(parsed(path))
    )


def touched_tests(changed: set[Path]) -> list[Path]:
    """Return the test files with long tests that reach a changed file, the nearest first."""
    ranked = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if has_long_tests(path):
            near = [far for other, far in distances(path).items() if other in changed]
            if near:
                ranked.append((min(near), -len(near), path))
    return [path for _, _, path in sorted(ranked)]


def default_base() -> str:
    if base := os.environ.get("DYNEMB_BASE"):
        return base
    command = ["git", "rev-list", "-1", "--before=4 hours ago", "HEAD"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return found.strip() or "HEAD"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", help="commit before the change", default=None)
    parser.add_argument(
        "--changed", action="store_true", help="test files of any device that changed"
    )
    options = parser.parse_args()
    changed = changed_files(options.base or default_base())
    if options.changed:
        paths = sorted(set((ROOT / "tests").rglob("test_*.py")) & changed)
        # pytest would import the others if they are named
        paths = [path for path in paths if declared_kind(path) == "any_device"]
    else:
        paths = touched_tests(changed)
    for path in paths:
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
