"""What the ranks of test_state do."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interrupting import at_line
from loaded_content import score_words
from torch import Tensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.types import DataType

import torch_dynemb as td
from torch_dynemb.table.content import read_content, read_counts
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    LoadPlanner,
    TableOptions,
)
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL

FEATURES = ["viewed", "bought", "user"]
FEATURES_OF = {"ads": FEATURES[:2], "users": FEATURES[2:]}
BATCH = 12
OPTIMIZERS = {
    "adam": td.Adam(lr=0.1, row_steps=True),
    "rowwise": td.RowWiseAdagrad(lr=0.1),
    "8 bits": td.Adam(lr=0.1, state_dtype=torch.uint8),
}


@dataclass(frozen=True)
class Setting:
    sharding_type: str = "row_wise"
    pooled: bool = True
    optimizer: str = "adam"
    policy: str = "plain"
    data_type: str = "FP32"


POLICIES = {
    "plain": td.Policy(),
    "scores": td.Policy(score=("timestamp", "frequency", "decayed"), half_life=90, ttl=1000),
    "admission": td.Policy(admission=td.AdmitFrequent(3)),
}
# of one table, where the policy is "admission"
DECAYED_ADMISSION = td.Policy(admission=td.AdmitFrequent(3, half_life_steps=4))


def model_of(setting: Setting) -> DistributedModelParallel:
    """A collection in the world that runs it."""
    world = dist.get_world_size()
    columns = 8 if not setting.pooled else 16
    dims = {"ads": 8, "users": columns}
    shared: dict[str, Any] = {"num_embeddings": 50, "data_type": DataType[setting.data_type]}
    meta = torch.device("meta")
    module: torch.nn.Module
    sharder: Any
    policies = dict.fromkeys(dims, POLICIES[setting.policy])
    if setting.policy == "admission":
        policies["users"] = DECAYED_ADMISSION
    options = {
        name: TableOptions(initializer=td.Normal(), policy=policy)
        for name, policy in policies.items()
    }
    optimizer = OPTIMIZERS[setting.optimizer]
    if setting.pooled:
        bags = [
            EmbeddingBagConfig(name=n, embedding_dim=d, feature_names=FEATURES_OF[n], **shared)
            for n, d in dims.items()
        ]
        module = EmbeddingBagCollection(tables=bags, device=meta)
        sharder = DynamicEmbeddingBagCollectionSharder(options=options, optimizer=optimizer)
    else:
        tables = [
            EmbeddingConfig(name=n, embedding_dim=d, feature_names=FEATURES_OF[n], **shared)
            for n, d in dims.items()
        ]
        module = EmbeddingCollection(tables=tables, device=meta)
        sharder = DynamicEmbeddingCollectionSharder(options=options, optimizer=optimizer)
    kernel = {"compute_kernel": DYNAMIC_KERNEL}
    types = {
        "row_wise": lambda t: row_wise(**kernel),
        "table_wise": lambda t: table_wise(rank=t % world, **kernel),
        "column_wise": lambda t: column_wise(ranks=list(range(min(world, 2))), **kernel),
    }
    plan = construct_module_sharding_plan(
        module,
        {name: types[setting.sharding_type](t) for t, name in enumerate(dims)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    return DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )


def train(model: DistributedModelParallel, rank: int, steps: range) -> None:
    """Trains on the same global batches, however many ranks there are."""
    world = dist.get_world_size()
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(0, 4, (len(FEATURES), BATCH), generator=generator)
        ids = torch.randint(0, 40, (int(lengths.sum()),), generator=generator) * 2**58 - 11
        whole = KeyedJaggedTensor(keys=FEATURES, values=ids, lengths=lengths.flatten()).to_dict()
        begin, end = BATCH * rank // world, BATCH * (rank + 1) // world
        mine = {name: whole[name].to_dense()[begin:end] for name in FEATURES}
        features = KeyedJaggedTensor(
            keys=FEATURES,
            values=torch.cat([bag for name in FEATURES for bag in mine[name]]),
            lengths=torch.tensor([len(bag) for name in FEATURES for bag in mine[name]]),
        )
        output = model(features).wait()
        values = output.to_dict() if hasattr(output, "to_dict") else output
        loss = torch.zeros(())
        for value in values.values():
            dense = value if isinstance(value, Tensor) else value.values()
            loss = loss + dense.square().sum()
        (loss * world / BATCH).backward()
        model.fused_optimizer.step()


def contents(model: DistributedModelParallel) -> dict[str, Any]:
    """By table: this rank's ids with rows, state and scores of their columns."""
    result: dict[str, Any] = {}
    for kernel in model.module.kernels():
        group = kernel.tables.group
        group.materialize()
        for t, shard in enumerate(kernel.tables.shards):
            waiting, content = read_counts(group.tables, t), read_content(group.tables, t)
            entry = {
                "columns": (shard.first_column, len(shard.columns)),
                "content": {**content._asdict(), "scores": score_words(content)},
                "waiting": None if waiting is None else waiting._asdict(),
                "steps": int(group.rows.row_clock[t]),
                "clock": int(group.index.clock[0]),
            }
            result.setdefault(shard.name, []).append(entry)
    return result


def save(rank: int, setting: Setting, path: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = model_of(setting)
    train(model, rank, range(steps))
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    return contents(model)


def load(rank: int, setting: Setting, path: str, more: range) -> dict[str, Any]:
    """Loads into a model that has learnt something else, and goes on."""
    torch.manual_seed(0)
    model = model_of(setting)
    train(model, rank, range(90, 92))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path, planner=LoadPlanner())
    model.load_state_dict(state["model"])
    train(model, rank, more)
    return contents(model)


def round_trip(rank: int, setting: Setting) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """From a model's state dict into another of the same sharding, without a file."""
    torch.manual_seed(0)
    model, other = model_of(setting), model_of(setting)
    train(model, rank, range(3))
    train(other, rank, range(50, 51))
    state = model.state_dict()
    other.load_state_dict(state)
    return contents(model), contents(other), sorted(state)


def load_static(rank: int, setting: Setting) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """The weights of a static collection as rows of ids 0, 1, ...; and what was missing."""
    torch.manual_seed(0)
    model = model_of(setting)
    train(model, rank, range(2))
    torch.manual_seed(1)
    dims = {"ads": 8, "users": 16}
    weights = {name: torch.randn(7, dim) for name, dim in dims.items()}
    state = {f"embedding_bags.{n}.weight": w for n, w in weights.items()}
    missing = model.load_state_dict(state, strict=False).missing_keys
    return contents(model), weights, missing


def load_wrong(rank: int, setting: Setting, other: Setting) -> tuple[str, bool]:
    """The error of loading the state of another model, and whether nothing was changed."""
    torch.manual_seed(0)
    model = model_of(setting)
    train(model, rank, range(2))
    before = contents(model)
    state = model_of(other).state_dict()
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        after = contents(model)
        same = all(
            torch.equal(x["content"]["rows"], y["content"]["rows"])
            for name in before
            for x, y in zip(before[name], after[name], strict=True)
        )
        return str(error), same
    return "nothing", False


def load_part(rank: int, left_out: str) -> dict[str, Any]:
    """Loads a state without some entries of the tables, strictly and not.

    Args:
        left_out: beginning of their names.
    """
    setting = Setting(policy="scores")
    torch.manual_seed(0)
    model, other = model_of(setting), model_of(setting)
    train(model, rank, range(3))
    train(other, rank, range(50, 52))
    state = model.state_dict()
    part = {key: of for key, of in state.items() if not key.split(".")[2].startswith(left_out)}
    before = contents(other)
    try:
        other.load_state_dict(dict(part))
        raised = ""
    except RuntimeError as error:
        raised = str(error)
    result: dict[str, Any] = {"strict": raised, "unchanged": _same(before, contents(other))}
    try:
        found = other.load_state_dict(dict(part), strict=False)
        result |= {"missing": found.missing_keys, "unexpected": found.unexpected_keys}
    except RuntimeError as error:
        result["not strict"] = str(error)
    return {**result, "saved": contents(model), "loaded": contents(other), "before": before}


def load_other_entries(rank: int) -> dict[str, str]:
    """What is raised for an entry that no table has, and where ranks have different entries."""
    torch.manual_seed(0)
    model = model_of(Setting())
    train(model, rank, range(2))
    before = contents(model)
    state = model.state_dict()
    name = "embedding_bags.ads.optimizer.exp_avg"
    raised = {}
    for case, given in {
        "unknown": {**state, "embedding_bags.ads.wieght": state[name]},
        "ranks": {key: of for key, of in state.items() if rank == 0 or key != name},
    }.items():
        try:
            model.load_state_dict(given)
        except RuntimeError as error:
            raised[case] = str(error)
    assert _same(before, contents(model))
    return raised


def _same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return all(
        torch.equal(x["content"][name], y["content"][name])
        for table in before
        for x, y in zip(before[table], after[table], strict=True)
        for name in ("ids", "rows", "scores")
    )


def _set_shard(rank: int, value: Any, column: int, number: int) -> None:
    """Sets a value of the first row of this rank's first shard, on rank 0 alone."""
    shards = value.local_shards()
    if rank == 0 and shards:
        shards[0].tensor[0, column] = number


# Entry, and what becomes of it: (rank, value) -> new value, or None where it was changed in place.
DAMAGES: dict[str, tuple[str, Any]] = {
    "version": ("layout", lambda _, t: t.index_fill(0, torch.tensor([0]), 2)),
    "steps": ("layout", lambda _, t: t.index_fill(0, torch.tensor([1]), -1)),
    "clock": ("layout", lambda _, t: t.index_fill(0, torch.tensor([2]), 2**63 - 1)),
    "old": ("layout", lambda _, t: t.index_fill(0, torch.tensor([2]), 2**32)),
    "score": ("layout", lambda _, t: t.index_fill(0, torch.tensor([5]), 99)),
    "scores": ("layout", lambda _, t: t.index_fill(0, torch.tensor([3]), -1)),
    "columns": ("layout", lambda _, t: t.index_fill(0, torch.tensor([5 + int(t[3])]), 4)),
    "time": ("layout", lambda _, t: t.index_fill(0, torch.tensor([t.numel() - 1]), 2**63 - 1)),
    "floats": ("layout", lambda _, t: t.float()),
    "no tensor": ("weight", lambda _, t: [1, 2]),
    "meta": ("layout", lambda _, t: t.to("meta")),
    "negative step": ("metadata", lambda rank, t: _set_shard(rank, t, 0, -7)),
    "negative frequency": ("metadata", lambda rank, t: _set_shard(rank, t, 2, -7)),
    "steps of rows": ("optimizer.step", lambda rank, t: _set_shard(rank, t, 0, -7)),
    "rows left out": ("bucket", lambda rank, t: _set_shard(rank, t, 0, 9999)),
    "no count": ("count", lambda rank, t: _set_shard(rank, t, 0, 0)),
    "many counts": ("count", lambda rank, t: _set_shard(rank, t, 0, 2**31)),
}


def load_damaged(rank: int, setting: Setting, names: list[str]) -> dict[str, tuple[str, bool]]:
    """The errors of loading damaged states, and whether nothing was changed, by damage."""
    torch.manual_seed(0)
    model = model_of(setting)
    train(model, rank, range(2))
    result = {}
    for name in names:
        entry, damage = DAMAGES[name]
        before = contents(model)
        state = dict(model.state_dict())
        (key,) = (key for key in state if key.endswith(f".ads.{entry}"))
        changed = damage(rank, state[key])
        state[key] = state[key] if changed is None else changed
        error = "nothing"
        try:
            model.load_state_dict(state)
        except RuntimeError as raised:
            error = str(raised)
        same = all(
            torch.equal(x["content"][part], y["content"][part])
            for table in before
            for x, y in zip(before[table], contents(model)[table], strict=True)
            for part in ("ids", "rows", "scores")
        )
        result[name] = error, same
    return result


def interrupted_loads(rank: int, setting: Setting) -> list[str]:
    """What Ctrl-C at lines of a load leaves: "before" or "after" of all tables, or "mixed"."""
    torch.manual_seed(0)
    saved, model = model_of(setting), model_of(setting)
    train(saved, rank, range(3))
    train(model, rank, range(50, 51))
    states = {"before": model.state_dict(), "after": saved.state_dict()}
    known = {}
    model.load_state_dict(states["after"])  # the clock does not go back after it
    for name, state in states.items():
        model.load_state_dict(state)
        known[name] = str(contents(model))
    lines = at_line(lambda: model.load_state_dict(states["after"]), 0)
    found = []
    for line in [*range(1, lines, lines // 8), *range(lines - 90, lines, 10)]:
        model.load_state_dict(states["before"])
        at_line(functools.partial(model.load_state_dict, states["after"]), line)
        now = str(contents(model))
        found.append(next((name for name in known if known[name] == now), "mixed"))
    train(model, rank, range(60, 62))
    return found
