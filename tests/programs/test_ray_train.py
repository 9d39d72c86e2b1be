"""The tutorial of Ray Train: workers are killed, and the job ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_ray import run

pytestmark = [pytest.mark.cpu_only("programs, in processes of their own"), pytest.mark.long]

EVERY = 4  # steps between checkpoints
SMALL = [
    *("--samples", "3000", "--held-out", "0.1", "--batch-size", "128", "--embedding-dim", "4"),
    *("--log-every", "2", "--threads", "1", "--checkpoint-every", str(EVERY)),
]


def test_killed_workers_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    whole = run("ray_train_run.py", tmp_path / "whole", "[]", *SMALL)
    killed = run("ray_train_run.py", tmp_path / "killed", str([EVERY + 1, 3 * EVERY + 3]), *SMALL)
    for rank in range(2):
        begun = (tmp_path / "killed" / f"begun-{rank}").read_text().split()
        assert begun == ["0", str(EVERY), str(3 * EVERY)]
    assert (tmp_path / "killed" / "killed-1").exists()
    assert killed.keys() == whole.keys() == {"samples", "ids", "loss", "auc"}
    assert killed["samples"] == whole["samples"] == 2700
    assert killed["ids"] == whole["ids"]
    assert killed["loss"] == pytest.approx(whole["loss"], abs=1e-5)
    assert killed["auc"] == pytest.approx(whole["auc"], abs=1e-3)
