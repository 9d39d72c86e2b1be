"""The DLRM job of tutorials/dlrm with Ray Train as its launcher, in place of torchrun.

Ray starts a worker for each rank of a gloo group. If a worker or its machine dies, Ray ends the
others and starts all of them again: they go on from the last checkpoint that was reported to it.

    python -m tutorials.ray_train --workers 2 --samples 200000 --checkpoint-every 20
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

import torch_dynemb as td
from tutorials.dlrm import options
from tutorials.dlrm.data import Position
from tutorials.dlrm.job.checkpoint import check_same_settings
from tutorials.dlrm.job.ranks import RankPass
from tutorials.dlrm.job.sharded_model import ShardedModel
from tutorials.dlrm.job.workflow import bar_of, open_data, reader_of

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # listen on loopback only
import ray
import ray.train
from ray.train.torch import TorchTrainer


def train(config: dict[str, Any]) -> None:
    """Train on the part of every batch of this rank, from the last checkpoint on.

    Args:
        config: ``arguments`` of the DLRM job; ``--out`` is a folder that all machines share.
    """
    context, last = ray.train.get_context(), ray.train.get_checkpoint()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    if last is not None and Path(last.path).name == "final":
        return  # a worker has died after the last report
    opts = options.parse(config["arguments"])
    data = open_data(opts, quiet=rank > 0)
    model = ShardedModel(opts, None, torch.device("cpu"))
    optimizers = [model.optimizer]
    progress = RankPass(model.parallel, optimizers, log_every=opts.log_every, figures=model.figures)

    start = Position()
    if last is not None:  # a checkpoint of any number of workers
        state = td.checkpoint.load(last.path, model.parallel, progress=False).state
        check_same_settings(state["settings"], options.settings_of_job(opts))
        model.dense_optimizer.load_state_dict(state["dense_optimizer"])
        progress.load_state_dict(state["progress"])
        start = Position(*state["position"])

    def save(name: str, position: Position, **more: float) -> None:
        """Save with all ranks, and report the checkpoint: from now on Ray goes on from it."""
        state = {
            "settings": options.settings_of_job(opts),
            "dense_optimizer": model.dense_optimizer.state_dict(),
            "progress": progress.state_dict(),
            "position": tuple(position),
        }
        path = opts.out / "ray" / name  # below the storage of the run, as Ray asks for
        td.checkpoint.save(path, model.parallel, state=state, progress=False)
        ray.train.report(
            {"samples": progress.samples, "ids": model.figures().ids, **more},
            checkpoint=ray.train.Checkpoint(path) if rank == 0 else None,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,  # it lies in its place
        )

    def after_step(position: Position) -> None:
        if progress.step % opts.checkpoint_every == 0:
            save(f"step-{progress.step}", position)

    read = reader_of(opts, data)
    samples = read(start=start, stop_line=data.train_lines, part=rank, parts=ranks)
    with bar_of(opts, "training", data.train_lines, start.line, hidden=rank > 0) as bar:
        progress.train(samples, bar, after_step)
    held_out = read(start=samples.position, stop_line=data.lines, part=rank, parts=ranks)
    auc = progress.evaluate(held_out)  # on rank 0, the one with figures that Ray keeps
    save("final", samples.position, loss=progress.points[-1].loss, auc=auc)


def fit(job: list[str], out: Path, workers: int, max_failures: int) -> dict[str, Any]:
    """Train on a Ray cluster of this machine; a run that is in ``out`` already goes on."""
    out = out.resolve()
    job = [*job, "--torchrec", "--out", str(out), "--samples-folder", str(out / "samples")]
    ray.init(num_cpus=workers, include_dashboard=False, _node_ip_address="127.0.0.1")
    try:
        trainer = TorchTrainer(
            train,
            train_loop_config={"arguments": job},
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(
                name="ray",
                storage_path=str(out),
                failure_config=ray.train.FailureConfig(max_failures=max_failures),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            ),
        )
        metrics: dict[str, Any] = trainer.fit().metrics
    finally:
        ray.shutdown()
    return metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The DLRM job, with Ray Train as its launcher.")
    parser.add_argument("data", nargs="*", help="files in the Criteo format; default: generated")
    parser.add_argument("--samples", default="200000")
    parser.add_argument("--checkpoint-every", default="20", metavar="STEPS")
    parser.add_argument("--out", type=Path, default=Path("runs/ray"), help="shared by all machines")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-failures", type=int, default=3, help="restarts of the workers")
    given = parser.parse_args()
    job = ["--samples", given.samples, "--checkpoint-every", given.checkpoint_every]
    job += map(os.path.abspath, given.data)
    print(json.dumps(fit(job, given.out, given.workers, given.max_failures)))
