"""torch.distributed.checkpoint with modules of this package on one rank, by torch's own planner."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import torch_dynemb as td

pytestmark = [
    pytest.mark.cpu_only("torch.distributed.checkpoint, on one device"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

TABLES = [
    td.TableConfig("_ads", 2, policy=td.Policy(score="frequency")),
    td.TableConfig("group", 4),
]


def model(optimizer: Any = None) -> nn.Module:
    optimizer = td.Adam(lr=0.1) if optimizer is None else optimizer
    return nn.ModuleDict(
        {
            "deep": nn.ModuleList([td.DynamicEmbedding(2, optimizer=optimizer)]),
            "all": td.DynamicEmbeddingBagCollection(TABLES, optimizer=optimizer),
            "dense": nn.Linear(2, 1),
        }
    )


def trained() -> nn.Module:
    result: Any = model()
    for ids in (torch.arange(40)[None], torch.arange(3)[None]):
        loss = result["deep"][0](ids).sum() + result["all"]({"_ads": ids, "group": ids}).sum()
        (loss + result["dense"](torch.ones(2))).backward()
        for optimizer in td.table_optimizers(result):
            optimizer.step()
    result["all"].group.erase(0, torch.arange(5))  # free rows
    return result


def same(one: nn.Module, other: nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return list(states[0]) == list(states[1]) and all(
        torch.equal(tensor, states[1][name]) for name, tensor in states[0].items()
    )


def by_state_dict(target: nn.Module, path: Path) -> None:
    state = target.state_dict()
    dcp.load(state, checkpoint_id=path)
    target.load_state_dict(state)


def by_helpers(target: nn.Module, path: Path) -> None:
    state = get_model_state_dict(target)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(target, state)


@pytest.mark.parametrize("load", [by_state_dict, by_helpers])
def test_a_model_loads_into_a_new_one(tmp_path: Path, load: Callable[..., None]) -> None:
    source, target = trained(), model()
    dcp.save(source.state_dict(), checkpoint_id=tmp_path)
    load(target, tmp_path)
    assert same(source, target)
    load(target, tmp_path)  # where sizes are the same, too
    dcp.save(model().state_dict(), checkpoint_id=tmp_path / "empty")
    load(target, tmp_path / "empty")  # of more rows than the checkpoint has
    assert target["all"].sizes() == {"_ads": 0, "group": 0}


def test_a_module_is_stateful_and_states_are_nested(tmp_path: Path) -> None:
    source, target = trained(), model()
    dcp.save({"model": source, "nested": {"again": source.state_dict()}}, checkpoint_id=tmp_path)
    dcp.load({"model": target}, checkpoint_id=tmp_path)
    assert same(source, target)
    state: dict[str, Any] = {"nested": {"again": model().state_dict()}}
    dcp.load(state, checkpoint_id=tmp_path)
    other = model()
    other.load_state_dict(state["nested"]["again"])
    assert same(source, other)


@pytest.mark.long
def test_other_tables_and_other_entries_are_refused(tmp_path: Path) -> None:
    dcp.save(trained().state_dict(), checkpoint_id=tmp_path)
    with pytest.raises(RuntimeError, match="optimizer"):
        by_state_dict(model(td.AdamW(lr=0.1)), tmp_path)
    other: dict[str, Tensor] = {"dense.weight": torch.zeros(3, 2), "format": torch.zeros(4)}
    with pytest.raises(CheckpointException, match="Size mismatch"):  # torch's own answer
        dcp.load(
            other, planner=dcp.DefaultLoadPlanner(allow_partial_load=True), checkpoint_id=tmp_path
        )


def test_an_optimizer_of_all_parameters_loads(tmp_path: Path) -> None:
    source, target = trained(), model()
    adam = torch.optim.Adam(source.parameters(), lr=0.1)  # anchors have neither gradient nor state
    adam.step()
    states = dict(zip(("model", "optimizer"), get_state_dict(source, adam), strict=True))
    dcp.save(states, checkpoint_id=tmp_path)
    other = torch.optim.Adam(target.parameters(), lr=0.1)
    states = dict(zip(("model", "optimizer"), get_state_dict(target, other), strict=True))
    dcp.load(states, checkpoint_id=tmp_path)
    set_state_dict(
        target, other, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    assert same(source, target)
    before, after = (
        optimizer.state[of.get_parameter("dense.weight")]["exp_avg"]
        for optimizer, of in ((adam, source), (other, target))
    )
    assert torch.equal(before, after)


@pytest.mark.long
def test_a_planner_that_is_imported_later_loads_tables(tmp_path: Path) -> None:
    bag = td.DynamicEmbeddingBag(2, mode="sum", optimizer=td.SGD(lr=0.1))
    bag(torch.arange(3)[None]).sum().backward()
    bag.optimizer.step()
    dcp.save(bag.state_dict(), checkpoint_id=tmp_path)
    program = f"""if True:
        import sys, torch, torch_dynemb as td
        bag = td.DynamicEmbeddingBag(2, optimizer=td.SGD(lr=0.1))
        state = bag.state_dict()
        assert "torch.distributed.checkpoint.default_planner" not in sys.modules
        import torch.distributed.checkpoint as dcp
        dcp.load(state, checkpoint_id={str(tmp_path)!r})
        bag.load_state_dict(state)
        print(len(bag))
    """
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "3\n", found.stderr
