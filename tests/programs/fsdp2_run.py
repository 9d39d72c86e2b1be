"""A click model under FSDP2 on the ranks of torchrun, saved and loaded as PyTorch's tutorial does.

``torchrun --nproc-per-node 2 tests/programs/fsdp2_run.py save FOLDER``, then ``load FOLDER``.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from frameworks_run import IDS, LABELS, Clicks, loss_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torch_dynemb as td


class Training(Stateful):
    """Model and optimizer, as one entry of a checkpoint."""

    def __init__(self) -> None:
        self.model = Clicks(dist.group.WORLD)
        fully_shard(self.model.head)
        fully_shard(self.model)
        assert isinstance(self.model.head.weight, DTensor)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        td.step_with(self.optimizer, self.model)

    def epoch(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for ids, labels in zip(
            IDS[rank::size].split(16), LABELS[rank::size].split(16), strict=True
        ):
            self.model(ids, labels)[0].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, object]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def run(call: str, folder: str) -> dict[str, float]:
    """Train four epochs, two of them before the checkpoint."""
    training = Training()
    if call == "save":
        training.epoch()
        training.epoch()
        dcp.save({"training": training}, checkpoint_id=folder)
    else:
        dcp.load({"training": training}, checkpoint_id=folder)
    loaded = loss_of(training.model)
    training.model.train()
    training.epoch()
    training.epoch()
    return {
        "rank": dist.get_rank(),
        "loaded": loaded,
        "loss": loss_of(training.model),
        "ids": len(training.model.ids),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(json.dumps(run(*sys.argv[1:])))
    dist.destroy_process_group()
