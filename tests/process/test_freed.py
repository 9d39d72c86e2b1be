"""`del` frees a module's memory at once: without the garbage collector, which may come late."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_dynemb as td
from torch_dynemb.recis import (
    EmbeddingEngine,
    EmbeddingOption,
    FilterHook,
    HashTable,
    RaggedTensor,
    SparseAdam,
    filter_out_sparse_param,
)
from torch_dynemb.table.group import TableGroup

pytestmark = pytest.mark.cpu_only("what is left of deleted objects in the process")

IDS = torch.arange(6)


@pytest.fixture(autouse=True)
def _no_garbage_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def trained(**arguments: Any) -> td.DynamicEmbedding:
    module = td.DynamicEmbedding(4, optimizer=td.Adam(lr=0.1), **arguments)
    module(IDS).sum().backward()
    module.optimizer.step()
    return module


def pooled() -> nn.Module:
    module = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.Adam(lr=0.1))
    weights = torch.ones(2, 3, requires_grad=True)
    module(IDS.reshape(2, 3), per_sample_weights=weights).sum().backward()
    module.optimizer.step()
    return module


def extended() -> nn.Module:
    policy = td.Policy(score="timestamp", capacity=5)
    tables = [td.TableConfig("a", 4, policy=policy), td.TableConfig("b", 8)]
    module = td.DynamicEmbeddingBagCollection(tables, optimizer=td.Adam(lr=0.1))
    module({"a": IDS[None], "b": IDS[None]}).sum().backward()
    module.optimizer.step()
    module.add_table(td.TableConfig("c", 4))
    return module


def loaded() -> nn.Module:
    module = trained()
    module.load_state_dict(module.state_dict())
    return module


def reoptimized() -> nn.Module:
    module = trained()
    module.set_optimizer(td.SGD(lr=1.0))
    return module


def read() -> nn.Module:
    module = trained()
    module.eval()
    module(IDS)
    return module


def failed() -> nn.Module:
    module = trained()
    output = module(IDS).sum()
    output.backward()
    with pytest.raises(RuntimeError):
        output.backward()
    return module


def managed() -> nn.Module:
    module = trained(policy=td.Policy(score="frequency", capacity=5))
    group = module.group
    group.evicted.call(lambda name, ids: None)
    module(IDS + 100).sum().backward()
    module.optimizer.step()
    group.remove(0, score_below=2)
    group.compact()
    group.usage.tables(wait=True)
    list(group.export(0))
    group.clear(0)
    return module


def scheduled() -> nn.Module:
    module = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(module.optimizer, 1)
    module.optimizer.step()
    scheduler.step()
    return module


def clipped() -> nn.Module:
    module = trained(split=True)
    module(IDS).sum().backward()
    td.clip_grad_norm_(module, 1.0)
    module.optimizer.step()
    return module


def scaled() -> nn.Module:
    module = trained(split=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(module(IDS).sum()).backward()
    scaler.step(module.optimizer)
    scaler.update()
    return module


def stepped() -> nn.Module:
    module = nn.Sequential(trained(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(module[1].parameters(), lr=0.1)
    td.step_with(optimizer, module)
    module(IDS).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return module


def filtered() -> nn.Module:
    hook = FilterHook("GlobalStepFilter", {"filter_step": 1, "filter_interval": 1})
    table = HashTable([4], name="t", filter_hook=hook)
    table(IDS).sum().backward()
    optimizer = SparseAdam({"t": table})
    for first in (0, 100):
        table(IDS + first).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return table


def engine() -> nn.Module:
    options = {
        "f": EmbeddingOption(embedding_dim=4, shared_name="a"),
        "g": EmbeddingOption(embedding_dim=4, shared_name="b", combiner="sum"),
    }
    module = EmbeddingEngine(options)
    optimizer = SparseAdam(filter_out_sparse_param(module))
    ragged = RaggedTensor(IDS, [torch.tensor([0, 2, 6])])
    outputs = module({"f": IDS[:, None], "g": ragged})
    sum(output.sum() for output in outputs.values()).backward()
    optimizer.step()
    return module


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "trained": trained,
    "split": lambda: trained(split=True),
    "pooled": pooled,
    "extended": extended,
    "loaded": loaded,
    "copied": lambda: copy.deepcopy(trained()),
    "reoptimized": reoptimized,
    "read": read,
    "failed": failed,
    "managed": managed,
    "scheduled": scheduled,
    "clipped": clipped,
    "scaled": scaled,
    "stepped": stepped,
    "frozen": lambda: td.freeze(nn.Sequential(trained())),
    "filtered": filtered,
    "engine": engine,
}


def groups_of(module: nn.Module) -> list[TableGroup]:
    parts = (getattr(part, "_group", None) for part in module.modules())
    return [group for group in parts if isinstance(group, TableGroup)]


@pytest.mark.parametrize("name", MAKERS)
def test_a_deleted_module_is_gone_with_all_its_tensors(name: str) -> None:
    module = MAKERS[name]()
    groups = groups_of(module)
    assert groups or name == "frozen"
    of_groups = [tensor for group in groups for tensor in group.tables.tensors()]
    things = [module, *groups, *of_groups, *module.buffers(), *module.parameters()]
    left = [weakref.ref(thing) for thing in things]
    del module, groups, of_groups, things
    assert [type(alive()) for alive in left if alive() is not None] == []


def test_an_optimizer_is_what_a_user_may_keep() -> None:
    """It has the rows, and goes on without the module."""
    module = trained()
    optimizer, group = module.optimizer, module.group
    gone = weakref.ref(module)
    del module
    assert gone() is None
    optimizer.step()
    assert group.steps == 2


PROGRAM = """
import gc, weakref
gc.disable()
import torch_dynemb as td
def make():
    module = td.DynamicEmbedding(4, optimizer=td.Adam(lr=0.1))
    return weakref.ref(module), weakref.ref(module.group), weakref.ref(module.group.rows.weights[0])
assert [gone() for gone in make()] == [None] * 3
"""


@pytest.mark.long
def test_the_first_module_of_a_process_is_gone_too() -> None:
    """It is the one that imports the parts of torch that are imported when they are needed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
