"""Other versions of TorchRec, from the directories in DYNEMB_TORCHREC_VERSIONS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

VARIABLE = "DYNEMB_TORCHREC_VERSIONS"
DIRECTORIES = [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


@pytest.mark.skipif(
    not DIRECTORIES,
    reason=f"{VARIABLE} names no directories with other versions: make test-torchrec-versions",
)
@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda name: Path(name).name)
def test_trains_as_unsharded(directory: str) -> None:
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([directory, *([before] if before else [])])
    script = Path(__file__).parent / "other_version.py"
    done = subprocess.run(
        [sys.executable, str(script), directory],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
