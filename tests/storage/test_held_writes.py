"""Rows with writes that wait are read from memory, and a snapshot waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import file_shim
import held_writes
import pytest

pytestmark = pytest.mark.cpu_only("stores on disks are the CPU's")


@pytest.mark.long
def test_rows_on_their_way_to_files_are_neither_lost_nor_mixed(tmp_path: Path) -> None:
    environment = file_shim.environment(tmp_path, holds=[held_writes.hold_of(tmp_path)])
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    program = [sys.executable, held_writes.__file__, str(tmp_path)]
    run = subprocess.run(
        program, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr[-4000:]
