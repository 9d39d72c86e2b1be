"""Training that goes on from the last commit of a log, in a process that is killed.

A row of ``counts`` is the number of its id's events: its optimizer is SGD with lr 1, and all
gradients are -1.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from killing_disk import KillingDisk
from table_content import content
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import torch_dynemb as td
from torch_dynemb.checkpoint import LoadReport
from torch_dynemb.delta_log import DeltaLog, DirectorySink, resume

EVENTS, BATCH, EVERY_STEPS = 480, 8, 3


class Events(Dataset[int]):
    """Ids of events, some of which are seldom."""

    def __len__(self) -> int:
        return EVENTS

    def __getitem__(self, number: int) -> int:
        return number * 7919 % (1 + number % 60)


def expected_counts() -> Counter[int]:
    return Counter(Events()[number] for number in range(EVENTS))


class Model(nn.Module):
    """Counts of ids, a table with a policy, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.counts = td.DynamicEmbedding(
            1, optimizer=td.SGD(lr=1.0), initializer=td.Constant(0.0), name="counts"
        )
        policy = td.Policy(score="frequency", capacity=40, admission=td.AdmitFrequent(2))
        self.ids = td.DynamicEmbedding(8, optimizer=td.Adam(lr=0.1), policy=policy, name="ids")
        self.dense = nn.Linear(8, 1)
        self.dense_optimizer = torch.optim.Adam(self.dense.parameters(), lr=0.01)

    def step(self, ids: Tensor) -> None:
        """Train on a batch of events."""
        loss = self.dense(self.ids(ids)).square().sum() - self.counts(ids).sum()
        self.dense_optimizer.zero_grad()
        loss.backward()
        for optimizer in (self.dense_optimizer, self.ids.optimizer, self.counts.optimizer):
            optimizer.step()

    def counted(self) -> Counter[int]:
        """Return the count of each id."""
        table = self.counts.group
        ids = torch.cat([batch.ids for batch in table.export(0)])
        return Counter(
            dict(zip(ids.tolist(), table.read(0, ids)[:, 0].int().tolist(), strict=True))
        )

    def everything(self) -> list[Any]:
        """Return rows, state and the dense part, as values that can be compared."""
        parameters = [of.tolist() for of in self.dense.parameters()]
        return [content(self), parameters, str(self.dense_optimizer.state_dict())]


def loaded(report: LoadReport, model: Model, loader: Any) -> bool:
    """Take the state of a commit. Return whether training has ended there."""
    if report.state is None:
        return False
    model.dense_optimizer.load_state_dict(report.state["optimizer"])
    loader.load_state_dict(report.state["loader"])
    return bool(report.state["ended"])


def train(path: Path, say: Callable[[int], object], kill_at: int = 0, workers: int = 0) -> Model:
    """Train on the events from the last commit on, until they end.

    Args:
        path: of the log.
        say: called with the number of each step.
        kill_at: number of the call of the file system at which the process ends; 0: none.
        workers: of the reader.
    """
    torch.set_num_threads(1)
    model = Model()
    torch.manual_seed(5)  # of the order of events
    loader = StatefulDataLoader(Events(), batch_size=BATCH, shuffle=True, num_workers=workers)
    log = DeltaLog(path, resume=True, every_steps=EVERY_STEPS)
    if kill_at:
        _kill_at(kill_at, log)
    ended = loaded(resume(log, model), model, loader)

    def state(ended: bool = False) -> dict[str, Any]:
        return {
            "optimizer": model.dense_optimizer.state_dict(),
            "loader": loader.state_dict(),
            "ended": ended,
        }

    if not ended:
        for number, ids in enumerate(loader):
            model.step(ids)
            say(number)
            log.step(state=state)
            if number == EVENTS // BATCH // 2:
                log.save(state=state)
        log.publish(state=lambda: state(ended=True))
    log.close()
    return model


def _kill_at(number: int, log: DeltaLog) -> None:
    disk = KillingDisk(number)
    for name in ("checkpoint.saving.save", "delta_log.log_folder"):
        sys.modules[f"torch_dynemb.{name}"]._DISK = disk  # type: ignore[attr-defined]
    assert isinstance(log._own.sink, DirectorySink)
    log._own.sink._disk = disk
