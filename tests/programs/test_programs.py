"""Models in the loops of other frameworks, which ``make programs`` fetches."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from fetch import DONE, FOLDER, PYTHON

pytestmark = [
    pytest.mark.cpu_only("programs, in processes of their own"),
    pytest.mark.long,
    pytest.mark.skipif(not DONE.exists(), reason=f"{FOLDER} is missing: make programs fetches it"),
]

HERE = Path(__file__).parent


def result(folder: Path, program: str, *arguments: str) -> dict[str, float]:
    """Run a program; return the last line that it prints."""
    done = subprocess.run(
        [str(PYTHON), str(HERE / program), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    last: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return last


def test_recbole_bpr_recalls_as_with_static_tables(tmp_path: Path) -> None:
    static, dynamic = (result(tmp_path, "recbole_run.py", kind) for kind in ("static", "dynamic"))
    for metric in ("recall@10", "recall@20"):
        assert dynamic[metric] > 0.95 * static[metric], (static, dynamic)


@pytest.mark.parametrize("name", ["lightning", "lightning-ddp", "trainer"])
def test_a_framework_trains_the_rows(tmp_path: Path, name: str) -> None:
    trained = result(tmp_path, "frameworks_run.py", name)
    assert trained["loss"] < 0.3  # 0.69 at the beginning
    # a rank of two has about half of the ids
    assert (150 < trained["ids"] < 325) if name == "lightning-ddp" else trained["ids"] > 450
