"""A program that is killed while it publishes: each line of its input starts a process that does.

The process takes the log that the line names from where it is, and publishes on; it prints its id
first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

import torch_dynemb as td
from torch_dynemb.delta_log import DeltaLog, DirectorySink, replay

IDS = 300


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        td.DynamicEmbedding(8, optimizer=td.SGD(lr=0.1), max_rows=IDS, name="table"),
        nn.Linear(2, 1),
    )


def change(model: nn.Sequential, number: int) -> None:
    """Give a model content that depends on a number."""
    group = model[0].group
    group.insert_or_assign(
        0, torch.arange(number % 7, IDS), torch.full((IDS - number % 7, 8), float(number))
    )
    group.erase(0, torch.arange(number % 7))
    nn.init.constant_(model[1].weight, float(number))


def check(model: nn.Sequential, number: int) -> None:
    """Raise AssertionError unless a model has the content of a number."""
    expected = new_model()
    if number > 0:
        change(expected, number)
    ids = torch.arange(IDS)
    assert model[0].sizes() == expected[0].sizes()
    there = expected[0].group.contains(0, ids)
    assert torch.equal(model[0].group.contains(0, ids), there)
    assert torch.equal(model[0].group.read(0, ids[there]), expected[0].group.read(0, ids[there]))
    assert torch.equal(model[1].weight, expected[1].weight)


def _publish_for_ever(path: Path) -> None:
    model = new_model()
    log = DeltaLog(path)
    if (path / "base").exists():
        number = replay(path, model)
        check(model, number)
    log.attach(model)
    assert isinstance(log._own.sink, DirectorySink)
    log._own.sink.segment_bytes = 100_000  # some batches
    while True:
        change(model, log.sequence + 1)
        log.publish()


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads before the forks, which would not be in the children
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                _publish_for_ever(Path(line.strip()))
            finally:
                os._exit(3)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else "ended", flush=True)
