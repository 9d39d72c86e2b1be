"""The tutorial of a module on raw ops: eager, compiled, exported; the package's bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_dynemb as td
from torch_dynemb.ops.columns import Meta
from tutorials.raw_ops import HashedSum, batches, train

pytestmark = pytest.mark.cpu_only("a tutorial with tensors on the CPU as tables")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_the_program_runs() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tutorials.raw_ops", "--steps", "60"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[2:] == ["the same bits: True", "exported, loaded: True"]


def test_it_learns() -> None:
    model = HashedSum(ids=1_000, dim=8, optimizer=td.Adam(lr=0.03))
    stays = HashedSum(ids=1_000, dim=8, optimizer=td.Adam(lr=0.0))
    assert train(model, model, 100) < train(stays, stays, 10) / 2
    assert len(model) == 500


def test_the_initial_values_are_those_of_the_package() -> None:
    """Manually made tensors have the meaning of those of a TableGroup."""
    model = HashedSum(ids=1_000, dim=8, optimizer=td.Adam(lr=0.03))
    bag = td.DynamicEmbeddingBag(
        8, mode="sum", optimizer=td.Adam(lr=0.03), initializer=td.Normal(std=0.01)
    )
    model.index_meta[0, Meta.SEED] = bag.group.index.meta[0, Meta.SEED]
    for ids, offsets, _ in batches(5, seed=3):
        for module in (model, bag):
            module(ids, offsets if module is model else offsets[:-1]).square().sum().backward()
        model.end_step()
        bag.optimizer.step()
    ids, offsets, _ = batches(1, seed=4)[0]
    assert torch.equal(model.eval()(ids, offsets), bag.eval()(ids, offsets[:-1]))


@pytest.mark.parametrize("ids", [1, 45, 100, 180, 1_000])
def test_there_is_room_for_as_many_ids_as_were_asked_for(ids: int) -> None:
    model = HashedSum(ids=ids, dim=8, optimizer=td.Adam(lr=0.03))
    for begin in range(0, ids, 7):
        some = torch.arange(begin, min(begin + 7, ids)) * 2_654_435_761
        model(some, torch.tensor([0, len(some)]))
    assert len(model) == ids


def test_a_table_without_room_refuses_the_whole_batch() -> None:
    model = HashedSum(ids=100, dim=8, optimizer=td.Adam(lr=0.03))
    ids, offsets, _ = batches(1, seed=0)[0]
    with pytest.raises(RuntimeError, match="needs 64 buckets for its ids but has room for 48"):
        model(ids, offsets)
    assert len(model) == 0
