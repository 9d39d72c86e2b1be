"""Programs in the environment of Ray."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from fetch import fetch_ray

HERE = Path(__file__).parent
HANGS_S = 1200
# Ray's processes may start slowly on a loaded machine
PATIENT = {
    "RAY_raylet_start_wait_time_s": str(HANGS_S),
    "RAY_agent_register_timeout_ms": str(1000 * HANGS_S),
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(HANGS_S),
}


def run(program: str, *arguments: str | Path) -> dict[str, Any]:
    """Run a program of this folder; return what it prints last."""
    root = str(HERE.parents[1])
    environment = os.environ | {"PYTHONPATH": root, "RAY_USAGE_STATS_ENABLED": "0"} | PATIENT
    done = subprocess.run(
        [fetch_ray(), HERE / program, *arguments],
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
