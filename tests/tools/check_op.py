"""Run the tests of one op of ``torch.ops.dynemb``, in one process.

    make check OP=multi_hash                          builds first
    python tests/tools/check_op.py multi_hash         what follows goes to pytest: -x, -v, --pdb

An op has tests of these kinds, and lacks none that it should have:

    schema            its line in csrc/ops.cpp, registrations, what it changes
    opcheck           torch.library.opcheck for each of its cases
    wrong arguments   what it says, that nothing has been changed by then, and 300 damaged calls
    values            against a reference; only tests that call the op count
    emulator          its CUDA kernel on the CPU, against the CPU's kernel and its errors
"""

from __future__ import annotations

import argparse
import ast
import difflib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
sys.path[:0] = [str(TESTS), str(ROOT), str(Path(__file__).resolve().parent)]

SCHEMA, OPCHECK, WRONG, VALUES, EMULATOR = (
    *("schema", "opcheck", "wrong arguments"),
    *("values", "emulator"),
)
FILES = {
    "ops/test_schemas.py": SCHEMA,
    "ops/test_opcheck.py": OPCHECK,
    "arguments/test_errors_ops.py": WRONG,
    "arguments/test_wrong_ops.py": WRONG,
    "cuda/test_cuda_kernels.py": EMULATOR,
}
# values of the ops that have no cases
OF_TAG = {
    "store": ("storage/test_row_store.py", "storage/test_pins.py", "storage/test_exactness.py"),
    "gpu": ("cuda/test_cuda_groups.py", "cuda/test_cuda_memory.py"),
}
HOW_TO_ADD = {
    SCHEMA: "add it to a listing in tests/ops/test_schemas.py; EXPECTTEST_ACCEPT=1 writes the rest",
    OPCHECK: "add a case to tests/op_cases/{family}.py",
    WRONG: "add a case to tests/op_cases/{family}.py, from which "
    "tests/arguments/test_errors_ops.py makes wrong ones",
    VALUES: "add a test that calls it to tests/{file}; tests/op_cases/__init__.py lists the files",
    EMULATOR: "add a case to tests/op_cases/{family}.py and a kernel to csrc/cuda, or define it on "
    "host in csrc/ops.cpp",
}
# of tests of values that do not name the op: how many that call it are enough, and how many to try
ENOUGH, MOST = 5, 60
CALLERS = 3  # functions between an op and what a test names
DAMAGED_CALLS = 300


def names_in(node: ast.AST) -> set[str]:
    """Names, attributes and short strings of a piece of code."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.add(part.value)
    return found


@cache
def names_of_tests(path: Path) -> dict[str, set[str]]:
    """What the tests of a file name, by function, also in functions of the file that they call."""
    direct: dict[str, set[str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            direct[node.name] = names_in(node)
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    direct[part.name] = names_in(part)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            direct[node.targets[0].id] = names_in(node)
    closed = {}
    for name in direct:
        seen, to_do, names = {name}, [name], set[str]()
        while to_do:
            of_this = direct[to_do.pop()]
            names |= of_this
            new = (of_this & direct.keys()) - seen
            seen |= new
            to_do.extend(new)
        closed[name] = names
    return closed


@cache
def names_of_package() -> list[tuple[str, set[str]]]:
    """What each function and method of the package names."""
    return [
        (node.name, names_in(node))
        for path in (ROOT / "torch_dynemb").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]


def callers(op: str) -> list[set[str]]:
    """Names of the op, of the functions that call it, of those that call these, and so on."""
    levels = [{op, op.rstrip("_")}]
    for _ in range(CALLERS):
        known = set().union(*levels)
        levels.append({name for name, names in names_of_package() if names & levels[-1]} - known)
    return levels


class Op:
    """An op, and where its tests are.

    Args:
        name: without namespace.

    Attributes:
        family: the module of its cases; None: it has no cases.
        values: the test files that compare it with a reference.
        kinds: that it should have.
    """

    def __init__(self, name: str) -> None:
        import torch
        from op_cases import FAMILIES

        from torch_dynemb._library.op_names import op_names, op_tags

        if name not in op_names():
            near = difflib.get_close_matches(name, op_names(), n=5, cutoff=0.5)
            raise SystemExit(
                f"OP={name}: no op of that name. "
                + (f"Near names: {', '.join(near)}. " if near else "")
                + "A new one is defined in csrc/ops.cpp."
            )
        self.name = name
        tag = op_tags().get(name)
        homes = [(family, files) for family, (of, files) in FAMILIES.items() if name in of]
        self.family, self.values = homes[0] if homes else (None, OF_TAG.get(tag or "", ()))
        arguments = getattr(torch.ops.dynemb, name).default._schema.arguments
        self.kinds = [SCHEMA]
        if tag != "gpu":
            self.kinds.append(VALUES)
        if tag not in ("gpu", "store"):
            self.kinds += [OPCHECK, *([WRONG] if arguments else [])]
        if tag is None:
            self.kinds.append(EMULATOR)

    def files(self) -> list[Path]:
        """The test files to collect."""
        return [TESTS / name for name in dict.fromkeys([*FILES, *self.values])]

    def is_named_by(self, item: pytest.Item, name: str) -> bool:
        """Whether a parameter of a test begins with a name, or else the code of the test has it."""
        words = words_of(item)
        if not words.isdisjoint(_all_names()):
            return name in words  # else the case of another op
        names = names_in_test(item)
        return not {name, name.rstrip("_")}.isdisjoint(names) or any(
            f"dynemb::{name}(" in text for text in names
        )

    @cached_property
    def callers(self) -> list[set[str]]:
        return callers(self.name)

    def distance(self, item: pytest.Item) -> int:
        """Functions between the op and what a test of values names."""
        if self.is_named_by(item, self.name):
            return 0
        names = names_in_test(item)
        far = (level for level, of in enumerate(self.callers) if level and not of.isdisjoint(names))
        return next(far, CALLERS + 1)


def names_in_test(item: pytest.Item) -> set[str]:
    return names_of_tests(item.path).get(item.name.partition("[")[0], set())


def words_of(item: pytest.Item) -> set[str]:
    """The first word of each parameter in the id of a test."""
    parameters = item.name.partition("[")[2].removesuffix("]").split("-")
    return {parameter.partition(" ")[0] for parameter in parameters}


@cache
def _all_names() -> set[str]:
    from torch_dynemb._library.op_names import op_names

    return set(op_names())


class Selection:
    """A pytest plugin that leaves the tests of one op, and counts them by kind."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.kind_of: dict[str, str] = {}
        self.distance: dict[str, int] = {}  # of tests of values
        self.tried = 0
        self.ran: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.calls = 0
        self.enough: int | None = None

    def kind(self, item: pytest.Item) -> str | None:
        """The kind of a test of the op; None: of another one."""
        file = item.path.relative_to(TESTS).as_posix()
        kind = FILES.get(file, VALUES)
        if kind == VALUES:
            self.distance[item.nodeid] = self.op.distance(item)
            return kind
        return kind if self.op.is_named_by(item, self.op.name) else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        kept = []
        for item in items:
            kind = self.kind(item)
            skipped = any(item.get_closest_marker(name) for name in ("skip", "long", "cuda"))
            if kind is not None and not skipped:
                self.kind_of[item.nodeid] = kind
                kept.append(item)
        # of tests that are as far from the op, the first of each file, then the second ones
        places = Counter[tuple[Path, int]]()
        order = {}
        for item in kept:
            distance = self.distance.get(item.nodeid, -1)
            order[item] = (distance, places[item.path, distance])
            places[item.path, distance] += 1
        kept.sort(key=order.__getitem__)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Passes over tests that do not name the op, if those that do have called it."""
        if self.distance.get(item.nodeid, 0) == 0:
            return None
        if self.enough is None:  # the first one after those that name the op
            self.enough = ENOUGH if self.ran[VALUES] == 0 else 0
        if self.ran[VALUES] >= self.enough or self.tried == MOST:
            return True
        self.tried += 1
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        kind, before, begin = self.kind_of[item.nodeid], self.calls, time.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds[kind] += time.perf_counter() - begin
            if kind != VALUES or self.calls > before:
                self.ran[kind] += 1

    def count_calls(self) -> None:
        """Counts calls of the op by Python, until the process ends."""
        import torch

        wanted = f"dynemb::{self.op.name}"
        for owner, name_of in (
            (torch._ops.OpOverload, lambda op: op.name()),
            (torch._ops.OpOverloadPacket, lambda op: op._qualified_op_name),
        ):
            owner.__call__ = self._counted(owner.__call__, name_of, wanted)  # type: ignore[method-assign]

    def _counted(
        self, call: Callable[..., Any], name_of: Callable[[Any], str], wanted: str
    ) -> Callable[..., Any]:
        def counted(op: Any, /, *arguments: Any, **keywords: Any) -> Any:
            self.calls += name_of(op) == wanted
            return call(op, *arguments, **keywords)

        return counted


def start_damaged_calls(op: Op) -> subprocess.Popen[str] | None:
    """Calls with damaged arguments, in a process that they may end; None: the op has no cases."""
    from op_cases import CASES

    if op.name not in CASES or WRONG not in op.kinds:
        return None
    command = [sys.executable, str(TESTS / "tools" / "fuzz_ops.py"), "--op", op.name]
    return subprocess.Popen(
        [*command, "--calls", str(DAMAGED_CALLS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("op", help="name of the op, without namespace")
    options, of_pytest = parser.parse_known_args()
    begin = time.perf_counter()
    import torch_dynemb  # noqa: F401  # registers the ops

    op = Op(options.op)
    selection = Selection(op)
    damaged = start_damaged_calls(op)
    selection.count_calls()
    files = [str(path) for path in op.files()]
    status = pytest.main(["-q", "-p", "no:cacheprovider", *files, *of_pytest], plugins=[selection])
    said = "" if damaged is None else damaged.communicate()[0]
    ran = selection.ran + Counter({WRONG: int(damaged is not None)})
    missing = [kind for kind in op.kinds if ran[kind] == 0]
    print(f"\n{op.name}:")
    for kind in (SCHEMA, OPCHECK, WRONG, VALUES, EMULATOR):
        more = f", and {DAMAGED_CALLS} damaged calls" if kind == WRONG and damaged else ""
        note = "" if kind in op.kinds else "  (not needed)"
        seconds = selection.seconds[kind]
        print(f"  {kind:16} {selection.ran[kind]:4} tests, {seconds:5.1f} s{more}{note}")
    print(f"  {time.perf_counter() - begin:.0f} s in all")
    is_damaged = damaged is not None and damaged.returncode != 0
    if is_damaged:
        print(f"{said[-3000:]}\nagain: {' '.join(map(str, damaged.args))} -v")
    for kind in missing if status in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else ():
        file = op.values[0] if op.values else "ops"
        how = HOW_TO_ADD[kind].format(family=op.family or "<family>", file=file)
        print(f"{op.name} has no test of {kind}: {how}")
    raise SystemExit(1 if missing or is_damaged else int(status))


if __name__ == "__main__":
    main()
