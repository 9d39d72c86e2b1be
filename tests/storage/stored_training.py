"""A model with rows on a disk, beside a table in memory, and batches known in advance."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from emulated_groups import emulated_cuda
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.files.disk import Disk

# Other arguments of ``SSDStore``, of all models of this process; see ``on_a_gpu``.
GIVEN: dict[str, Any] = {}
IDS = 600
BATCH = 48


class StoredModel(nn.Module):
    """Rows of users on a disk, of ads in memory.

    Args:
        path: of the store; None: all rows are in memory.
        policy: of users; default: few of them have a row, those that are seen often.
        storage: other arguments of ``SSDStore``.
    """

    def __init__(
        self, path: Path | None, *, policy: td.Policy | None = None, **storage: object
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        given = {"cache": "64 rows", "segment": "64KiB", "io": "threads", **GIVEN, **storage}
        if policy is None:
            policy = td.Policy(score="frequency", capacity=400, admission=td.AdmitFrequent(2))
        self.users = td.DynamicEmbedding(
            24,
            name="users",
            optimizer=td.Adam(lr=0.05),
            policy=policy,
            storage=None if path is None else td.SSDStore(path, **given),  # type: ignore[arg-type]
        )
        self.ads = td.DynamicEmbedding(8, name="ads", optimizer=td.Adagrad(lr=0.1))
        self.dense = nn.Linear(32, 1)
        self.dense_optimizer = torch.optim.Adam(self.dense.parameters(), lr=0.01)
        self.steps = 0

    def forward(self, users: Tensor, ads: Tensor) -> Tensor:
        return self.dense(torch.cat([self.users(users), self.ads(ads)], 1))  # type: ignore[no-any-return]

    def step(self) -> str:
        """One step; returns the loss, all of its bits."""
        draw = torch.Generator().manual_seed(self.steps)
        # few ids often, many seldom
        users = (torch.rand(BATCH, generator=draw) ** 2 * IDS).long() * 7919
        ads = torch.randint(0, 50, (BATCH,), generator=draw)
        target = torch.rand(BATCH, 1, generator=draw)
        self.dense_optimizer.zero_grad()
        loss = (self(users, ads) - target).square().mean()
        loss.backward()
        self.dense_optimizer.step()
        self.users.optimizer.step()
        self.ads.optimizer.step()
        self.steps += 1
        return loss.item().hex()

    def train_steps(self, count: int) -> list[str]:
        """Losses of so many steps."""
        return [self.step() for _ in range(count)]

    def values(self) -> Tensor:
        """Rows of all ids, those that were never seen too."""
        self.eval()
        with torch.no_grad():
            pieces = [self.users(ids) for ids in (torch.arange(IDS) * 7919).split(BATCH)]
            pieces.append(self.ads(torch.arange(50)))
        self.train()
        return torch.cat([piece.flatten() for piece in pieces])

    def save(self, name: str, *, keep: int = 1) -> None:
        state = {"steps": self.steps, "dense_optimizer": self.dense_optimizer.state_dict()}
        td.checkpoint.save_snapshot(self, name, state=state, keep_last=keep)

    def load(self, name: str | None = None) -> int:
        """Goes back to a snapshot; returns the number of its steps."""
        state = td.checkpoint.load_snapshot(self, name).state
        self.dense_optimizer.load_state_dict(state["dense_optimizer"])
        self.steps = state["steps"]
        return self.steps


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Models are on the emulated GPU, with a cache there above that of the host."""
    GIVEN["device_cache"] = "32 rows"
    try:
        with emulated_cuda(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a step needed", RuntimeWarning)
            yield
    finally:
        del GIVEN["device_cache"]


class _ToldDisk(Disk):
    """A disk that reports every call of a save, before it."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Disk, name):
            self._tell(name)
        return super().__getattribute__(name)


def train(
    path: Path, steps: int, save_at: Collection[int], tell: Callable[[str], object] = print
) -> None:
    """Goes on from a snapshot if there is one, trains and makes snapshots.

    Args:
        path: of the store.
        steps: until which it trains.
        save_at: after which steps it makes a snapshot.
        tell: called with events: ``step 3``, ``saved 3``, and calls of the file system.
    """
    torch.set_num_threads(1)
    for of in ("snapshots.save", "saving.save"):
        sys.modules[f"torch_dynemb.checkpoint.{of}"]._DISK = _ToldDisk(tell)  # type: ignore[attr-defined]
    model = StoredModel(path)
    if td.checkpoint.snapshots(model):
        model.load()
    while model.steps < steps:
        model.step()
        tell(f"step {model.steps}")
        if model.steps in save_at:
            model.save("last" if model.steps % 2 else f"step-{model.steps}")
            tell(f"saved {model.steps}")
