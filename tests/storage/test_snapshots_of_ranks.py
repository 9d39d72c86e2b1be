"""Snapshots that ranks make together: all of them go back to the same one, or none does."""

from __future__ import annotations

import errno
import gc
import sys
from pathlib import Path

import pytest
import torch
from ranks import Ranks

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.files.disk import Disk

pytestmark = pytest.mark.cpu_only("stores on disks are the CPU's")


class RankModel(torch.nn.Module):
    """A table of the rank's own, with a store of its own, and a dense part that ranks share."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        storage = td.SSDStore(folder / f"{rank}", cache="64 rows", segment="64KiB")
        self.table = td.DynamicEmbedding(
            8, name=f"of rank {rank}", optimizer=td.Adam(lr=0.1), storage=storage
        )
        td.private_to_rank(self.table)
        self.dense = torch.nn.Linear(8, 1)
        self.rank = rank

    def train_step(self, step: int) -> str:
        draw = torch.Generator().manual_seed(10 * step + self.rank)
        ids = torch.randint(0, 300, (40,), generator=draw)
        loss = self.dense(self.table(ids)).square().mean()
        loss.backward()
        self.table.optimizer.step()
        return loss.item().hex()


class NoSync(Disk):
    """Fails when a folder has to be on the disk."""

    def sync_folder(self, path: Path) -> None:
        raise OSError(errno.EIO, "the disk fails", str(path))


def goes_back_together(rank: int, folder: Path) -> None:
    model = RankModel(folder, rank)
    for step in range(3):
        model.train_step(step)
    checkpoint.save_snapshot(model, "a", state={"step": 3})
    losses = [model.train_step(step) for step in range(3, 6)]
    save = sys.modules["torch_dynemb.checkpoint.snapshots.save"]
    for failing in (0, 1):
        if rank == failing:
            save._DISK = NoSync()  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="the disk fails"):
            checkpoint.save_snapshot(model, "b")
        save._DISK = Disk()  # type: ignore[attr-defined]
        assert len(list((folder / f"{rank}" / "index").iterdir())) == 1
    with pytest.raises(ValueError, match=r"save_snapshot: .*name"):
        checkpoint.save_snapshot(model, f"other-{rank}")
    assert checkpoint.snapshots(folder / "0") == ["a"]
    del model
    gc.collect()  # errors that were raised have frames that have it
    model = RankModel(folder, rank)
    assert checkpoint.load_snapshot(model).state == {"step": 3}
    assert [model.train_step(step) for step in range(3, 6)] == losses
    checkpoint.save_snapshot(model, "b")
    assert checkpoint.snapshots(folder / "0") == ["b"]
    assert len(list((folder / f"{rank}" / "index").iterdir())) == 1


@pytest.mark.long
def test_two_ranks_go_back_together(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(goes_back_together, tmp_path)
    model = RankModel(tmp_path, 0)
    with pytest.raises(RuntimeError, match=r"saved by 2 ranks with 2 stores.*has 1 with 1.*save"):
        checkpoint.load_snapshot(model)
