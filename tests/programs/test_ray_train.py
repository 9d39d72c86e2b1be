"""The tutorial of Ray Train: workers are killed, and the job ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fetch import fetch_ray

pytestmark = [pytest.mark.cpu_only("programs, in processes of their own"), pytest.mark.long]

HERE = Path(__file__).parent
HANGS_S = 1200
# Ray's processes may start slowly on a loaded machine
PATIENT = {
    "RAY_raylet_start_wait_time_s": str(HANGS_S),
    "RAY_agent_register_timeout_ms": str(1000 * HANGS_S),
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(HANGS_S),
}
EVERY = 4  # steps between checkpoints
SMALL = [
    *("--samples", "3000", "--held-out", "0.1", "--batch-size", "128", "--embedding-dim", "4"),
    *("--log-every", "2", "--threads", "1", "--checkpoint-every", str(EVERY)),
]


def run(out: Path, kills: list[int]) -> dict[str, Any]:
    """Run the tutorial; return what it prints last."""
    command = [fetch_ray(), HERE / "ray_train_run.py", out, json.dumps(kills), *SMALL]
    root = str(HERE.parents[1])
    environment = os.environ | {"PYTHONPATH": root, "RAY_USAGE_STATS_ENABLED": "0"} | PATIENT
    done = subprocess.run(
        list(map(str, command)),
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_killed_workers_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", [])
    killed = run(tmp_path / "killed", [EVERY + 1, 3 * EVERY + 3])
    for rank in range(2):
        begun = (tmp_path / "killed" / f"begun-{rank}").read_text().split()
        assert begun == ["0", str(EVERY), str(3 * EVERY)]
    assert (tmp_path / "killed" / "killed-1").exists()
    assert killed.keys() == whole.keys() == {"samples", "ids", "loss", "auc"}
    assert killed["samples"] == whole["samples"] == 2700
    assert killed["ids"] == whole["ids"]
    assert killed["loss"] == pytest.approx(whole["loss"], abs=1e-5)
    assert killed["auc"] == pytest.approx(whole["auc"], abs=1e-3)
