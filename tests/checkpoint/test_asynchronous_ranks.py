"""Asynchronous saves of two ranks, which have a table together and train on meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from held_disk import HeldDisk, files_of, full, held_disk
from ranks import Ranks
from saved_models import differences
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import checkpoint, ops

pytestmark = pytest.mark.cpu_only("processes of their own")


class HalfTable(nn.Module):
    """The ids of a table that this rank has."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.slots = checkpoint.IdSlots(rank, rank + 1, 2)
        rows = td.DynamicEmbedding(8, name="half", optimizer=td.Adam(lr=0.1))
        self.rows = td.private_to_rank(rows)  # each rank has other ids

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.rows(ids[self.slots.owned(ids)])
        return rows


def _half(module: HalfTable, path: str) -> Iterable[checkpoint.TablePart]:
    yield checkpoint.TablePart(
        name=path, group=module.rows.group, table=0, embedding_dim=8, ids=module.slots
    )


td.register_module(HalfTable, tables=_half)


def model_of(rank: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(HalfTable(rank), nn.Linear(8, 1))


def train(model: nn.Sequential, steps: range) -> None:
    """Steps of both ranks: the gradients of the dense layer are summed over them."""
    for step in steps:
        model.zero_grad()
        model(torch.arange(40 * step, 40 * step + 90)).sum().backward()
        for parameter in model[1].parameters():
            dist.all_reduce(parameter.grad)
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=1e-3)
        model[0].rows.optimizer.step()


@contextmanager
def held() -> Iterator[HeldDisk]:
    """The disk of this rank."""
    with pytest.MonkeyPatch.context() as patch, held_disk(patch) as disk:
        yield disk


def trains_on(rank: int, folder: Path) -> None:
    model = model_of(rank)
    train(model, range(3))
    twin = copy.deepcopy(model)
    with held() as disk:
        handle = checkpoint.save(folder / "a", model, asynchronous=True)
        disk.wait_until_reached()
        train(model, range(3, 8))  # its collectives do not meet those of the thread
        assert not handle.done()
        disk.let_go()
        train(model, range(8, 12))
        handle.wait()
    checkpoint.save(folder / "b", twin)
    assert differences(files_of(folder / "a"), files_of(folder / "b")) == []
    loaded = model_of(rank)
    report = checkpoint.load(folder / "a", loaded)
    assert report.tables["0"].ids == 170
    assert loaded[0].rows.sizes() == twin[0].rows.sizes()


def in_other_groups(rank: int, folder: Path) -> None:
    """The first rank is in two groups that the other one is not in, which torch's names count."""
    groups = [dist.new_group([0]) for _ in range(2)]
    checkpoint.save(folder / "a", nn.Linear(2, 2), asynchronous=True).wait()
    assert dist.get_rank(groups[0]) == (0 if rank == 0 else -1)


def refuses_another(rank: int, folder: Path) -> None:
    """Also where only one rank saves something in the background."""
    model = model_of(rank)
    checkpoint.save(folder / "both", model)
    alone = dist.new_group([1])
    with held() as disk:
        if rank == 1:
            first = checkpoint.save(
                folder / "alone", nn.Linear(2, 2), process_group=alone, asynchronous=True
            )
            disk.wait_until_reached()
        for asynchronous in (False, True):
            with pytest.raises(RuntimeError, match=r"/alone has not ended yet") as raised:
                checkpoint.save(folder / "both", model, asynchronous=asynchronous)
            told = raised.value.__cause__
            assert (told is None) == (rank == 1)
        with pytest.raises(RuntimeError, match=r"/alone has not ended yet"):
            checkpoint.load(folder / "both", model)
        disk.let_go()
        if rank == 1:
            first.wait()
        dist.barrier()
        checkpoint.save(folder / "both", model, asynchronous=True).wait()
    assert {path.name for path in folder.iterdir()} == {"alone", "both"}


def all_are_told(rank: int, folder: Path) -> None:
    """The disk of one rank is full."""
    model = model_of(rank)
    train(model, range(2))
    with held() as disk:
        waited = checkpoint.save(folder / "c", model, asynchronous=True)
        disk.let_go(full() if rank == 1 else None)
        with pytest.raises(OSError, match="No space left on device"):
            waited.wait()
        handle = checkpoint.save(folder / "c", model, asynchronous=True)
        assert handle._ended.wait(60)
        with pytest.raises(RuntimeError, match=r"no step was made.*No space left"):
            model[0].rows.optimizer.step()
        train(model, range(2, 4))
        disk.error = None
        checkpoint.save(folder / "c", model, asynchronous=True).wait()
    assert [path.name for path in folder.iterdir()] == ["c"]


def memory_is_shared(rank: int, folder: Path) -> None:
    """What is free on a machine has to do for the copies of all its ranks."""
    model = model_of(rank)
    train(model, range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "available_memory", lambda: 60 << 20)  # enough for one
        with pytest.raises(RuntimeError, match=r"copies for 2 ranks on this machine"):
            checkpoint.save(folder / "c", model, asynchronous=True)
        patch.setattr(ops, "available_memory", lambda: 120 << 20)
        checkpoint.save(folder / "c", model, asynchronous=True).wait()


@pytest.mark.parametrize("case", [trains_on, refuses_another, all_are_told, memory_is_shared])
def test_two_ranks_save_while_they_train(tmp_path: Path, two_ranks: Ranks, case: object) -> None:
    assert callable(case)
    two_ranks.run(case, tmp_path)


def test_ranks_may_be_in_different_groups(tmp_path: Path) -> None:
    ranks = Ranks(2)  # which have not saved anything in the background yet
    try:
        ranks.run(in_other_groups, tmp_path)
    finally:
        ranks.stop()
