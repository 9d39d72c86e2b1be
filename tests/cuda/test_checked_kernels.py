"""CUDA kernels under sanitizers of the CPU: races, accesses out of bounds, first values.

tests/emulator/README.md says what they find.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from emulator import checked as emulator
from emulator.build import EMULATOR, SOURCES, build_library
from emulator.checked import Finding
from emulator.mutants import MUTANTS
from op_cases import CASES

from torch_dynemb._library.op_names import tagged_ops

pytestmark = [pytest.mark.long, pytest.mark.cpu_only("sanitizers of the compiler")]


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    tools = str(SOURCES.parent / "tests" / "tools")
    sys.path.insert(0, tools)
    import checked_kernels

    yield checked_kernels
    sys.path.remove(tools)
    del sys.modules["checked_kernels"]


def selftest(check: str, calls: str) -> list[set[Finding]]:
    """What a check finds in each of the calls of selftest.cpp, one a line."""
    sources = [EMULATOR / "selftest.cpp"]
    library = build_library(
        "emulator_selftest", sources, compile_flags=[], link_flags=[], check=check
    )
    program = f"""
import ctypes, sys
kernels = ctypes.CDLL({str(library)!r})
word = ctypes.c_int()
for number, call in enumerate({calls.split()!r}):
    print("case:", number, file=sys.stderr, flush=True)
    eval(call)
"""
    environment = emulator.environment_of(check)
    environment["TSAN_OPTIONS"] += ":suppress_equal_stacks=0"  # calls differ in arguments only
    reply = subprocess.run(
        [*emulator.command_of(check), sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert reply.returncode == 0, reply.stderr
    found = emulator.findings_of(reply.stderr)
    return [
        {finding for finding, cases in found.items() if str(number) in cases}
        for number in range(len(calls.split()))
    ]


def test_what_orders_threads() -> None:
    """The first four calls lack an order: no fence of the writer, none of the reader, a shuffle."""
    found = selftest("races", " ".join(f"kernels.test_order({which})" for which in range(9)))
    assert [bool(of_call) for of_call in found] == [True] * 4 + [False] * 5


def test_shared_memory_ends_where_it_was_declared_to() -> None:
    calls = [f"kernels.test_write_shared({i},ctypes.byref(word))" for i in (0, 31, 32)]
    first, last, beyond = selftest("bounds", " ".join(calls))
    assert not first | last
    assert beyond


def every_op() -> set[str]:
    """Ops with kernels; "stage_" stands for those of rows in a cache."""
    return {*CASES, "stage_"} - tagged_ops("host")


def ops_of(digests: dict[str, str]) -> set[str]:
    return {case.split()[0] for case in digests}


@pytest.mark.parametrize("seed", [0, 1])
def test_no_races(tool: ModuleType, seed: int) -> None:
    result = tool.checked("races", ["--seed", str(seed)], fill=0xA5)
    assert not result.findings
    assert ops_of(result.digests) == every_op()


def test_bounds_and_first_values(tool: ModuleType) -> None:
    """No access out of bounds; results are the same whatever fresh memory has."""
    first, second = (tool.checked("bounds", [], fill=fill) for fill in tool.FILLS)
    assert not first.findings
    assert not second.findings
    assert first.digests == second.digests
    assert ops_of(first.digests) == every_op()


def test_every_mutant_is_found(tool: ModuleType) -> None:
    races = tool.checked("races", ["--mutants"], fill=0xA5)
    first, second = (tool.checked("bounds", ["--mutants"], fill=fill) for fill in tool.FILLS)
    survivors = []
    for number, mutant in enumerate(MUTANTS, 1):
        name = f"mutant {number}"
        if mutant.check == "values":
            of_first, of_second = (
                {case: value for case, value in run.digests.items() if case.startswith(f"{name} ")}
                for run in (first, second)
            )
            found = of_first != of_second
        else:
            run = races if mutant.check == "races" else first
            found = any(name in cases for cases in run.findings.values())
        if not found:
            survivors.append((number, mutant))
    assert not survivors


def test_every_family_has_a_mutant() -> None:
    families = {path.name for path in (SOURCES / "cuda").iterdir() if any(path.glob("*.cu"))}
    without_kernels = {"memory"}
    assert {mutant.family for mutant in MUTANTS} == families - without_kernels
