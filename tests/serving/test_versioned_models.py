"""Live packages in C++: updates beside runs, and versions of which no run reads two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import versions_program
from packaged import VERSION

if TYPE_CHECKING:
    from conftest import Package

pytestmark = pytest.mark.cpu_only("the package is compiled for the CPU")

VERSIONS = 1000


@pytest.fixture(scope="module")
def seen(live_package: Package) -> dict[str, Any]:
    """What threads saw in a thousand versions, and then in a thousand updates of one."""
    return versions_program.run(versions_program.build(), live_package.path, versions=VERSIONS)


def test_no_run_reads_two_versions(seen: dict[str, Any]) -> None:
    assert seen["runs"] >= VERSIONS // 2
    assert seen["mixed"] == 0, seen
    assert seen["backwards"] == 0, seen
    assert seen["first"] == VERSION
    # 100, and 50 new ones less 5, of each version but the last erased by the next
    assert seen["ids"] == 145
    assert seen["refused"]


def test_memory_stays_flat_over_versions(seen: dict[str, Any]) -> None:
    """Of 800 versions, each of which brings 6 KB of rows and ids."""
    assert seen["grown"] < 800 * 6000 / 2, seen


def test_threads_run_a_package_that_is_updated(seen: dict[str, Any]) -> None:
    assert seen["different"] == 0, seen
    assert seen["torn"] == 0, seen
    assert seen["last"], seen


def test_wrong_arguments_are_told(seen: dict[str, Any]) -> None:
    assert seen["errors"] == [
        "apply: table is 'u', expected one of 'bags.u', 'bags.v'",
        "apply: rows should be float32, bfloat16 or float16 [2, 8] of the CPU, a row of table "
        "'bags.u' for each id",
        "apply: ids should be a tensor of the CPU of int64 with 1 dimension",
        "erase: ids should be a tensor of the CPU of int64 with 1 dimension",
        "set_dense: the dense state has no tensor bags.u",
        "set_dense: scale should be Float [1]",
    ]
