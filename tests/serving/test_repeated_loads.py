"""Loading a package again and again takes no more memory than loading it once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import repeated_loads
from packaged import MANY

if TYPE_CHECKING:
    from conftest import Package

pytestmark = pytest.mark.cpu_only("watches memory of the CPU")

TABLE_BYTES = MANY * 4 * 4  # rows of one table alone
LOADS = 100


@pytest.mark.long
def test_repeated_loads_take_no_memory(package: Package) -> None:
    program = Path(repeated_loads.__file__)
    run = subprocess.run(
        [sys.executable, program, package.path, str(LOADS)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{program.parent}:{program.parents[1]}"},
    )
    # a load that kept the rows of a table would take as much each time
    assert int(run.stdout) < TABLE_BYTES * LOADS / 4
