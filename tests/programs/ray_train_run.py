"""The tutorial of Ray Train with kills of rank 1: ``ray_train_run.py OUT STEPS ARGUMENT...``."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import ray.train

from tutorials import ray_train
from tutorials.dlrm.job import ranks
from tutorials.dlrm.loop import Pass

tutorial_train = ray_train.train


def train(config: dict[str, Any]) -> None:
    """Train as the tutorial does. A rank writes where it begins, and rank 1 dies at some steps."""
    real_train, real_batch = Pass.train, ranks.RankPass._train_batch
    out, rank = Path(config["killed_in"]), int(os.environ["RANK"])
    # the workers of before may be of the same process
    killed = len(list(out.glob("killed-*")))

    def begun(progress: Any, *arguments: Any) -> None:
        with (out / f"begun-{rank}").open("a") as file:
            file.write(f"{progress.step}\n")
        real_train(progress, *arguments)

    def trained(progress: Any, *arguments: Any) -> None:
        real_batch(progress, *arguments)
        if rank == 1 and killed < len(config["kills"]) and progress.step == config["kills"][killed]:
            (out / f"killed-{killed}").touch()
            # until Ray has taken the last report: it polls, and a kill right after may come before
            ray.train.get_all_reported_checkpoints(ray.train.CheckpointConsistencyMode.COMMITTED)
            os.kill(os.getpid(), signal.SIGKILL)

    with (
        mock.patch.object(Pass, "train", begun),
        mock.patch.object(ranks.RankPass, "_train_batch", trained),
    ):
        tutorial_train(config)


if __name__ == "__main__":
    out, kills = Path(sys.argv[1]), json.loads(sys.argv[2])
    out.mkdir()
    fitted = ray_train.TorchTrainer

    def trainer(_: Any, *, train_loop_config: dict[str, Any], **more: Any) -> Any:
        config = {**train_loop_config, "killed_in": str(out), "kills": kills}
        return fitted(train, train_loop_config=config, **more)

    with mock.patch.object(ray_train, "TorchTrainer", trainer):
        print(json.dumps(ray_train.fit(sys.argv[3:], out, 2, len(kills))))
