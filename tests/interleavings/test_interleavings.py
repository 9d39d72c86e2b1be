"""Protocols between threads of the CPU: all interleavings with few preemptions, and random ones.

tests/README.md says what that finds, and what it cannot.
"""

from __future__ import annotations

import pytest
from interleaved import SCENES, run
from interleaving_mutants import MUTANTS, Mutant

pytestmark = [pytest.mark.long, pytest.mark.cpu_only("programs in C++")]

SEEDS = (1, 2, 3)


@pytest.mark.parametrize("scene", SCENES)
def test_all_interleavings_with_two_preemptions(scene: str) -> None:
    """And one load that returns an older value."""
    explored = run(scene, "--preemptions", "2", "--old", "1")
    assert not explored.failure, explored.failure
    assert explored.executions > 500


@pytest.mark.parametrize("scene", SCENES)
def test_random_interleavings(scene: str) -> None:
    for seed in SEEDS:
        explored = run(scene, "--random", "30000", "--seed", str(seed))
        assert not explored.failure, explored.failure


@pytest.mark.parametrize("number", range(1, len(MUTANTS) + 1))
def test_every_fault_is_found(number: int) -> None:
    mutant: Mutant = MUTANTS[number - 1]
    explored = run(mutant.program, "--random", "200000", "--mutant", str(number), mutants=True)
    assert explored.failure.endswith(f"{mutant.found}\n"), (mutant.what, explored)


def test_a_failure_is_repeated_by_its_decisions() -> None:
    arguments = ("--mutant", "1")
    scene = MUTANTS[0].program
    failure = run(scene, "--random", "10000", *arguments, mutants=True).failure
    decisions = failure.splitlines()[-2].removeprefix("--replay ")
    assert run(scene, "--replay", decisions, *arguments, mutants=True).failure == failure
