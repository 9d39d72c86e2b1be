"""A table of four times the memory that it may take is trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("rows of tables on a GPU lie in its memory")


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_table_of_four_times_the_memory_is_trained(tmp_path: Path) -> None:
    program = Path(__file__).with_name("bounded_training.py")
    ran = subprocess.run(
        [sys.executable, program, str(tmp_path / "rows")], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "bytes trained in" in ran.stdout
