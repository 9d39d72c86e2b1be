"""What the ranks of test_dcp do."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_models import Table, kernels, sharded
from torch import Tensor
from torch.autograd.profiler import profile
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.planner_helpers import _create_read_items
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

import torch_dynemb as td
from torch_dynemb.distributed.owners import part_of
from torch_dynemb.rows import exchange as row_exchange
from torch_dynemb.rows import loader as load
from torch_dynemb.torchrec import LoadPlanner, Stager, TableOptions

TABLES = [
    Table("ads", 8, ("viewed",)),
    Table("fixed", 4, ("hour",), sharding="table_wise", dynamic=False),
]
LARGE_DIM = 64
WAIT_S = 60


def model_of(
    policy: td.Policy | None = None, *, sharding: str = "row_wise", dim: int = 8, **options: Any
) -> DistributedModelParallel:
    given = TableOptions(initializer=td.Normal(), policy=policy or td.Policy(), **options)
    tables = [replace(TABLES[0], sharding=sharding, dim=dim), TABLES[1]]
    return sharded(tables, optimizer=td.Adagrad(lr=0.1), options={"ads": given})


def train(model: DistributedModelParallel, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(2 * step + rank)
        ads = torch.randint(0, 40, (12,), generator=generator)
        hours = torch.randint(0, 7, (12,), generator=generator)
        lengths = torch.ones(24, dtype=torch.int64)
        batch = KeyedJaggedTensor(
            keys=["viewed", "hour"], values=torch.cat([ads, hours]), lengths=lengths
        )
        outputs = model(batch)
        torch.stack([output.square().sum() for output in outputs.values()]).sum().backward()
        model.fused_optimizer.step()


def local_tensors(state: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Copies of what this rank has of every entry."""
    return {
        name: [shard.tensor.detach().clone() for shard in value.local_shards()]
        if isinstance(value, ShardedTensor)
        else [value.detach().clone()]
        for name, value in state.items()
    }


def same(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> list[str]:
    """Names of the entries that differ."""
    return [
        name
        for name in one.keys() | other.keys()
        if len(one[name]) != len(other[name])
        or not all(torch.equal(x, y) for x, y in zip(one[name], other[name], strict=True))
    ]


class HeldWriter(dcp.FileSystemWriter):
    """Writes nothing before it may."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.may_write = threading.Event()

    def write_data(self, *arguments: Any) -> Any:
        if not self.may_write.wait(WAIT_S):
            raise TimeoutError("the writer was never released")
        return super().write_data(*arguments)


def async_save(rank: int, path: str) -> tuple[list[str], list[str]]:
    """Trains between the cut and the writing.

    Returns:
        Which entries of a model that has loaded the file differ from those of the cut, and which
        entries of the model have changed since the cut.
    """
    torch.manual_seed(0)
    model, other = model_of(), model_of()
    group = dist.new_group(backend="gloo")
    train(model, rank, range(3))
    state = {"model": model.state_dict(), "dense": torch.full((3,), 1.0)}
    cut = local_tensors(state["model"])
    writer = HeldWriter(path)
    saving = dcp.async_save(
        state, storage_writer=writer, async_stager=Stager(), process_group=group
    )
    train(model, rank, range(3, 6))
    state["dense"].fill_(2.0)
    changed = same(cut, local_tensors(model.state_dict()))
    writer.may_write.set()
    saving.result()
    loaded = {"model": other.state_dict(), "dense": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=path, planner=LoadPlanner())
    other.load_state_dict(loaded["model"])
    differing = same(cut, local_tensors(other.state_dict()))
    if not torch.equal(loaded["dense"], torch.full((3,), 1.0)):
        differing.append("dense")
    dist.destroy_process_group(group)
    return differing, changed


class PlannerOfOthers(dcp.DefaultLoadPlanner):
    """Plans as programs do that accept a part of a model: it compares no sizes."""

    def create_local_plan(self) -> dcp.LoadPlan:
        saved = self.metadata.state_dict_metadata
        found = [
            _create_read_items(name, saved[name], value)
            for name, value in self.state_dict.items()
            if name in saved
        ]
        return dcp.LoadPlan([item for items in found for item in items])


def load_by_planners_of_others(rank: int, path: str) -> list[list[str]]:
    """Which entries of new models differ that have loaded a file by other planners than ours."""
    model = model_of()
    train(model, rank, range(3))
    dcp.save(model.state_dict(), checkpoint_id=path)
    saved = local_tensors(model.state_dict())
    differing = []
    for planner in (None, PlannerOfOthers()):
        other = model_of()
        state = other.state_dict()
        dcp.load(state, checkpoint_id=path, planner=planner)
        other.load_state_dict(state)
        differing.append(same(saved, local_tensors(other.state_dict())))
    return differing


def save_with_stager_of_torch(rank: int, path: str) -> str:
    """The error."""
    model = model_of()
    try:
        dcp.async_save({"model": model.state_dict()}, checkpoint_id=path)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def _allocated(events: Any) -> int:
    """The most bytes of tensors that were alive at once, beyond those of the beginning."""
    now = most = 0
    memory = [event for event in events if event.name() == "[memory]"]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def _rows(ids: Tensor) -> Tensor:
    return (ids[:, None] + torch.arange(LARGE_DIM)).float()


def load_large(rank: int, count: int, policy: td.Policy, stays: bool) -> tuple[int, int, bool]:
    """Loads a table of many blocks.

    Args:
        count: ids of the table on all ranks.
        stays: whether ranks own the rows that they have.

    Returns:
        The bytes of this rank's rows and state, the most bytes that were allocated on the way, and
        whether the state dict is as before and all rows have arrived.
    """
    ranks = dist.get_world_size()
    model, other = model_of(policy, dim=LARGE_DIM), model_of(policy, dim=LARGE_DIM)
    ids = torch.arange(count) * 977
    mine = ids[part_of(ids, ranks) == rank]
    (kernel,) = kernels(model)
    kernel.tables.group.insert_or_assign(0, mine, _rows(mine))
    state = model.state_dict()
    if not stays:  # a rank has what the other one owns
        _swap_parts(state, rank)
    before = local_tensors(state)
    with (
        mock.patch.object(row_exchange, "BLOCK_BYTES", 1 << 14),
        mock.patch.object(row_exchange, "IDS_OF_A_BLOCK", 1 << 11),
        mock.patch.object(load, "_IDS_AT_ONCE", 1 << 11),
        profile(use_cpu=True, profile_memory=True, use_kineto=True) as profiled,
    ):
        other.load_state_dict(state)
    most = _allocated(profiled.kineto_results.events())
    (kernel,) = kernels(other)
    group = kernel.tables.group
    whole = torch.equal(group.read(0, mine), _rows(mine)) and group.size(0) == mine.numel()
    return 2 * 4 * LARGE_DIM * mine.numel(), most, whole and not same(before, local_tensors(state))


def _swap_parts(state: dict[str, Any], rank: int) -> None:
    """Sends the values of a shard to the other of two ranks, in place of its own; sizes change."""
    for name, value in state.items():
        if not isinstance(value, ShardedTensor) or not name.startswith("bags.embedding_bags.ads."):
            continue
        if name.endswith("bucket"):
            continue
        metadata = value.metadata()
        (local,) = value.local_shards()
        theirs = next(of for of in metadata.shards_metadata if of.placement.rank() != rank)
        received = torch.empty(theirs.shard_sizes, dtype=local.tensor.dtype)
        work = dist.isend(local.tensor.contiguous(), dst=1 - rank)
        dist.recv(received, src=1 - rank)
        work.wait()
        placements = {of.placement.rank(): of.placement for of in metadata.shards_metadata}
        for of in metadata.shards_metadata:
            of.placement = placements[1 - of.placement.rank()]
        shard = type(local)(received, theirs)
        state[name] = ShardedTensor._init_from_local_shards_and_global_metadata([shard], metadata)


def load_unfit(rank: int) -> dict[str, tuple[str, list[str]]]:
    """Errors of loading ids that a table cannot have, and its entries that have changed."""
    saved = model_of()
    train(saved, rank, range(4))
    state = saved.state_dict()
    result = {}
    for name, unfit in {
        "capacity": model_of(td.Policy(capacity=6, on_full="default")),
        "padding": model_of(padding_idx=7),
    }.items():
        train(unfit, rank, range(90, 91))
        before = local_tensors(unfit.state_dict())
        error = "nothing"
        try:
            unfit.load_state_dict(state)
        except RuntimeError as raised:
            error = str(raised)
        changed = same(before, local_tensors(unfit.state_dict()))
        result[name] = error, [entry for entry in changed if ".ads." in entry]
    return result


def rows_read(rank: int, path: str, sharding: str) -> tuple[int, int]:
    """Saves a table that is sharded by rows, and loads it with another sharding.

    Returns:
        Rows that this rank reads, and rows that it has afterwards.
    """
    model, other = model_of(), model_of(sharding=sharding)
    train(model, rank, range(4))
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path, planner=LoadPlanner())
    weight = state["model"]["bags.embedding_bags.ads.weight"]
    other.load_state_dict(state["model"])
    has = sum(kernel.tables.group.size(0) for kernel in kernels(other))
    return sum(shard.tensor.shape[0] for shard in weight.local_shards()), has
