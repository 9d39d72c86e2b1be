"""A trainer of the small model that publishes to a delta log from the base of its live package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from packaged import Features, SmallModel, base_of, features, small_model
from torch import Tensor

import torch_dynemb as td

if TYPE_CHECKING:
    from conftest import Package

INPUTS = features(32, 400, seed=5)


def new_trainer(
    package: Package, log: Path, *, segment_bytes: int = 64 << 20
) -> tuple[SmallModel, td.checkpoint.DeltaLog]:
    """A model with the content of the package, and the log to which it publishes.

    Args:
        package: the live one that tests share.
        log: directory of the log.
        segment_bytes: from how many bytes on its files get no more batches.
    """
    model = small_model(seed=1, many=0)
    td.checkpoint.load(base_of(package.path), model)
    sink = td.checkpoint.DirectorySink(log / "r000-of-001", segment_bytes=segment_bytes)
    publisher = td.checkpoint.DeltaLog(sink)
    publisher.attach(model, base=base_of(package.path))
    return model, publisher


def train(model: SmallModel, number: int, *, dense: bool = False) -> None:
    """A training step with new ids, after which others go.

    Args:
        model: it.
        number: of the step; steps of one number do the same.
        dense: whether the dense part changes, too.
    """
    model.zero_grad()
    score, others = model(*features(16, 100, seed=number))
    (score.sum() + others["pooled"].square().sum()).backward()
    model.bags.optimizer.step()
    model.bags.group.erase(number % 2, torch.arange(7 * number, 7 * number + 5))
    if dense:
        with torch.no_grad():
            model.top.weight -= 0.01
            model.scale += 1


def publish(publisher: td.checkpoint.DeltaLog) -> int:
    """The number of the next commit, which is on the disk."""
    number = publisher.publish()
    publisher.flush()
    return number


def answer(model: SmallModel, inputs: tuple[Features, Tensor] = INPUTS) -> list[Tensor]:
    """What a frozen copy of the trainer's model gives now."""
    score, others = td.freeze(model)(*inputs)
    return [score, *others.values()]


__all__ = ["INPUTS", "answer", "new_trainer", "publish", "train"]
