"""What two ranks do in test_killed_ranks.py: saves of which one dies at a chosen call."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from faulty_disk import FaultyDisk, FullDisk, Killed
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.files.disk import Disk
from torch_dynemb.table import state as table_state

SAVE = sys.modules["torch_dynemb.checkpoint.saving.save"]
TIMEOUT_S = 60  # of collectives: more than any of them takes, and the bound of a wait for the dead


class Sharded(nn.Module):
    """A table with ids on two ranks, and a dense state that both have."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        torch.manual_seed(3)
        policy = td.Policy(score="frequency", admission=td.AdmitFrequent(2))
        self.table = td.DynamicEmbedding(
            4, optimizer=td.Adam(lr=0.1), policy=policy, max_rows=200, name="table"
        )
        td.private_to_rank(self.table)
        self.dense = nn.Linear(4, 2)

    def train_to(self, epoch: int) -> Sharded:
        """Makes the content that the model of an epoch has."""
        slots = checkpoint.IdSlots(self.rank, self.rank + 1, 2)
        ids = torch.arange(40 * (epoch + 1))
        for _ in range(2):
            self.table(ids[slots.owned(ids)]).sum().backward()
            self.table.optimizer.step()
        with torch.no_grad():
            self.dense.weight.fill_(epoch)
        return self

    def content(self) -> dict[str, Tensor]:
        """Copies of all that it holds."""
        return {"weight": self.dense.weight.clone(), **table_state.save(self.table.group.tables)}


def _tables_of_sharded(module: Sharded, path: str) -> Iterator[checkpoint.TablePart]:
    slots = checkpoint.IdSlots(module.rank, module.rank + 1, 2)
    yield checkpoint.TablePart("table", module.table.group, 0, 4, 0, slots)


td.register_module(Sharded, tables=_tables_of_sharded)


def save_on(
    disk: Disk, path: Path, model: Sharded, epoch: int, group: dist.ProcessGroup | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SAVE, "_DISK", disk)
        checkpoint.save(path, model, state={"epoch": epoch}, process_group=group)


def found(rank: int, path: Path, contents: list[dict[str, Tensor]]) -> int:
    """Which of the contents a checkpoint has, on this rank."""
    model = Sharded(rank)
    epoch: int = checkpoint.load(path, model).state["epoch"]
    own = model.content()
    assert own.keys() == contents[epoch].keys()
    assert all(torch.equal(own[name], contents[epoch][name]) for name in own)
    return epoch


class Point(NamedTuple):
    """The rank that dies, and at which of its calls."""

    victim: int
    number: int


def calls(rank: int, folder: str) -> list[str]:
    """Run a save over an old one in which no process dies."""
    disk = FaultyDisk()
    for epoch in range(2):
        disk = FaultyDisk()
        save_on(disk, Path(folder) / "tried" / "last", Sharded(rank).train_to(epoch), epoch, None)
    return disk.calls


def killed(rank: int, folder: str, points: Iterable[Point]) -> list[tuple[str, int]]:
    """For every point, what this rank's save raised, and which content is there afterwards."""
    models = [Sharded(rank).train_to(epoch) for epoch in range(2)]
    contents = [model.content() for model in models]
    template, path = Path(folder) / "template" / "last", Path(folder) / "place" / "last"
    save_on(FaultyDisk(), template, models[0], 0, None)
    result = []
    for victim, number in points:
        if rank == 0:
            shutil.copytree(template.parent, path.parent)
        group = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT_S))
        assert isinstance(group, dist.ProcessGroup)
        dist.barrier()
        disk = FaultyDisk(number if rank == victim else 0)
        raised = ""
        try:
            save_on(disk, path, models[1], 1, group)
        except (Killed, Exception) as error:
            raised = type(error).__name__
        disk.crash()
        dist.destroy_process_group(group)  # closes its connections, as the end of a process does
        del group
        dist.barrier()
        epoch = found(rank, path, contents)
        save_on(FaultyDisk(), path, models[1], 1, None)
        assert found(rank, path, contents) == 1
        assert [entry.name for entry in path.parent.iterdir()] == ["last"]
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path.parent)
        result.append((raised, epoch))
    return result


def without_room(rank: int, folder: str, victim: int) -> tuple[str, list[str]]:
    """What a save raises where one rank finds no room, and what lies there then."""
    path = Path(folder) / "full" / "last"
    contents = [Sharded(rank).train_to(epoch) for epoch in range(2)]
    save_on(Disk(), path, contents[0], 0, None)
    disk = FullDisk("write_at", 4) if rank == victim else Disk()
    with pytest.raises(OSError, match="No space left") as raised:
        save_on(disk, path, contents[1], 1, None)
    assert found(rank, path, [contents[0].content()]) == 0
    left = [entry.name for entry in path.parent.iterdir()]
    dist.barrier()  # before the next call makes something there
    return str(raised.value), left
