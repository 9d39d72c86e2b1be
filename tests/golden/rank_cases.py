"""Tables that several processes share: training, saves, loads by more ranks and fewer.

TorchRec and the packages are imported by the processes only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contents import Outputs, contents
from made_tensors import ids, numbers, spread, values
from package_cases import backward, batch, one_embedding, one_steps, options
from ranks import Ranks
from torch import Tensor, nn
from trained_cases import BETAS

import torch_dynemb as td
from torch_dynemb import migrate, oneembedding, recis

STEPS = 3


def on_ranks(function: Callable[..., Any], counts: Mapping[str, int], folder: Path) -> Outputs:
    """Run a function with each number of processes, one after another.

    Args:
        function: of (rank, path, what); returns the outputs of a rank.
        counts: number of processes by what they do.
        folder: for the files of all of them.
    """
    found: Outputs = {}
    for what, count in counts.items():
        ranks = Ranks(count)
        try:
            of_ranks = ranks.run(function, str(folder / "saved"), what)
        finally:
            ranks.stop()
        for rank, outputs in enumerate(of_ranks):
            found.update({f"{what} {rank}: {name}": of for name, of in outputs.items()})
    return found


def engine_steps(rank: int, path: str, what: str) -> Outputs:
    """Train an engine and save it, or load it and train on; publish to a log, or replay it."""
    torch.manual_seed(11)
    module, optimizer = engine()
    found: Outputs = {}
    if what != "trained":
        td.checkpoint.load(path, module)
        found.update(contents(module, of="loaded"))
    for step in range(STEPS):
        found[f"step {step}"] = engine_step(module, optimizer, rank, step)
    found.update(contents(module))
    if what == "trained":
        td.checkpoint.save(path, module)
        frozen = td.freeze(module)(engine_features(range(20), 7))
        found["frozen"] = {name: of.detach() for name, of in sorted(frozen.items())}
        log = td.delta_log.DeltaLog(f"{path} log", optimizer_state=True)
        log.attach(module)
        for step in range(STEPS, STEPS + 2):
            engine_step(module, optimizer, rank, step)
            log.publish()
        log.close()
    else:
        twin, _ = engine()
        td.delta_log.replay(f"{path} log", twin)
        found.update(contents(twin, of="replayed"))
    return found


def engine() -> tuple[recis.EmbeddingEngine, recis.SparseAdam]:
    """Make an engine of rows that are trained, and its optimizer."""
    chosen = {name: of for name, of in options().items() if name != "content"}
    module = recis.EmbeddingEngine(chosen)
    return module, recis.SparseAdam(recis.filter_out_sparse_param(module), lr=0.1, betas=BETAS)


def engine_features(samples: range, step: int) -> dict[str, Any]:
    """Make the features that such an engine looks up."""
    return {name: of for name, of in batch(samples, step).items() if name != "content"}


def engine_step(
    module: recis.EmbeddingEngine, optimizer: recis.SparseAdam, rank: int, step: int
) -> dict[str, Tensor]:
    """Train a step on the samples of a rank; returns all outputs."""
    output = module(engine_features(range(4 * rank, 4 * rank + 4), step))
    outputs = backward(output, step + rank)
    optimizer.step()
    optimizer.zero_grad()
    return outputs


def multi_table_steps(rank: int, path: str, what: str) -> Outputs:
    """Train tables of OneEmbedding and save them, or load them and train on."""
    torch.manual_seed(11)
    module = one_embedding(Path(path))
    adam = torch.optim.Adam(module.parameters(), lr=0.1, betas=BETAS)
    optimizer = oneembedding.Optimizer(adam, [module])
    found: Outputs = {}
    if what != "trained":
        td.checkpoint.load(path, module)
        found.update(contents(module, of="loaded"))
    first = 10 * rank
    found["outputs"] = one_steps(module, optimizer, range(first, first + STEPS))
    if what == "trained":
        td.checkpoint.save(path, module)
    return {**found, **contents(module)}


# -- TorchRec --------------------------------------------------------------------------------------

TABLES = {"ads": ["clicked", "shown"], "users": ["user"]}


def sharded(sharding: str, pooled: bool) -> Any:
    """Shard a collection of TorchRec over the ranks of the process group."""
    import torch.distributed as dist
    import torchrec
    from torchrec.distributed import sharding_plan, types
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from torch_dynemb.torchrec import (
        DynamicEmbeddingBagCollectionSharder,
        DynamicEmbeddingCollectionSharder,
        TableOptions,
    )

    world = dist.get_world_size()
    meta = torch.device("meta")
    shared: dict[str, Any] = {"num_embeddings": 50, "embedding_dim": 8}
    collection: nn.Module
    sharder: Any
    given: dict[str, Any] = {
        "options": {
            name: TableOptions(initializer=td.Normal(), policy=td.Policy(score="frequency"))
            for name in TABLES
        },
        "optimizer": td.Adam(lr=0.1, betas=BETAS),
    }
    if pooled:
        bags = [
            torchrec.EmbeddingBagConfig(name=name, feature_names=features, **shared)
            for name, features in TABLES.items()
        ]
        collection = torchrec.EmbeddingBagCollection(bags, device=meta)
        sharder = DynamicEmbeddingBagCollectionSharder(**given)
    else:
        rows = [
            torchrec.EmbeddingConfig(name=name, feature_names=features, **shared)
            for name, features in TABLES.items()
        ]
        collection = torchrec.EmbeddingCollection(rows, device=meta)
        sharder = DynamicEmbeddingCollectionSharder(**given)

    def planned(number: int) -> Any:
        generate: Any = {
            "row_wise": sharding_plan.row_wise,
            "column_wise": lambda: sharding_plan.column_wise(ranks=list(range(world))),
            "table_wise": lambda: sharding_plan.table_wise(rank=number % world),
        }[sharding]()

        def generated(*arguments: Any) -> Any:
            plan = generate(*arguments)
            plan.compute_kernel = "customized_kernel"
            return plan

        return generated

    plan = sharding_plan.construct_module_sharding_plan(
        collection,
        {name: planned(number) for number, name in enumerate(TABLES)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    model = nn.ModuleDict({"tables": collection})
    return DistributedModelParallel(
        model,
        env=types.ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=types.ShardingPlan({"tables": plan}),
        sharders=[sharder],
    )


def torchrec_steps(sharding: str, pooled: bool, rank: int, path: str, what: str) -> Outputs:
    """Train a sharded collection and save it in two ways, or load it and train on."""
    import torch.distributed.checkpoint as dcp

    from torch_dynemb.torchrec import LoadPlanner

    torch.manual_seed(11)
    model = sharded(sharding, pooled)
    found: Outputs = {}
    if what != "trained":
        td.checkpoint.load(path, model)
        found.update(contents(model, of="loaded"))
    for step in range(STEPS):
        found[f"step {step}"] = torchrec_step(model, pooled, rank, step)
    found.update(contents(model))
    twin = sharded(sharding, pooled)
    if what == "trained":
        td.checkpoint.save(path, model)
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{path} by torch")
        migrate.load(twin, {f"tables.{name}": rows_of(name) for name in TABLES}, batch_size=16)
        found.update(contents(twin, of="migrated"))
    else:
        state = {"model": twin.state_dict()}
        dcp.load(state, checkpoint_id=f"{path} by torch", planner=LoadPlanner())
        twin.load_state_dict(state["model"])
        found.update(contents(twin, of="loaded by torch"))
    return found


def torchrec_step(model: Any, pooled: bool, rank: int, step: int) -> dict[str, Tensor]:
    """Train a step on the samples of a rank; returns all outputs."""
    import torchrec

    keys = [feature for features in TABLES.values() for feature in features]
    lengths = numbers(len(keys) * 5, 4, seed=step + 9 * rank)
    of_values = ids(int(lengths.sum()), below=30, seed=step + 9 * rank)
    output = model.module["tables"](torchrec.KeyedJaggedTensor(keys, of_values, lengths=lengths))
    outputs = {name: of if pooled else of.values() for name, of in sorted(to_dict(output).items())}
    trained = backward(outputs, step)
    model.fused_optimizer.step()
    return trained


def rows_of(name: str) -> migrate.Source:
    """Make the rows of a table in another library."""
    rows = values(40, 8, seed=len(name))
    return migrate.read_tensors(
        spread(torch.arange(40)),
        rows,
        state={"exp_avg": rows / 4, "exp_avg_sq": rows.square()},
        scores={"frequency": numbers(40, 9, seed=3)},
        optimizer_steps=4,
    )


def to_dict(output: Any) -> dict[str, Any]:
    """Take the outputs of a collection by feature."""
    waited = output.wait() if hasattr(output, "wait") else output
    return waited if isinstance(waited, dict) else waited.to_dict()


def row_wise_bags(rank: int, path: str, what: str) -> Outputs:
    return torchrec_steps("row_wise", True, rank, path, what)


def column_wise_bags(rank: int, path: str, what: str) -> Outputs:
    return torchrec_steps("column_wise", True, rank, path, what)


def table_wise_bags(rank: int, path: str, what: str) -> Outputs:
    return torchrec_steps("table_wise", True, rank, path, what)


def row_wise_rows(rank: int, path: str, what: str) -> Outputs:
    return torchrec_steps("row_wise", False, rank, path, what)


# sums of ours go by rank; those of TorchRec may not, and have one order for two ranks only
COUNTS = {"trained": 2, "by one": 1, "by three": 3}

CASES: dict[str, Callable[[Path], Outputs]] = {
    "ranks recis": partial(on_ranks, engine_steps, COUNTS),
    "ranks oneembedding": partial(on_ranks, multi_table_steps, COUNTS),
    "ranks torchrec row-wise": partial(on_ranks, row_wise_bags, {"trained": 2, "by one": 1}),
    "ranks torchrec column-wise": partial(on_ranks, column_wise_bags, {"trained": 2, "by one": 1}),
    "ranks torchrec table-wise": partial(on_ranks, table_wise_bags, {"trained": 2, "by one": 1}),
    "ranks torchrec sequences": partial(on_ranks, row_wise_rows, {"trained": 2, "by one": 1}),
}
