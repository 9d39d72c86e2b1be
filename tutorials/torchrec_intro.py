"""TorchRec with tables that need no vocabulary: ``python -m tutorials.torchrec_intro``.

A small click model on two ranks, from its features to int8 inference, in the order in which one
meets TorchRec: jagged features, a collection of tables, a plan, DistributedModelParallel, fused
optimizers in two ways, quantization. Users and products are dynamic tables, which take any 64-bit
id; days of the week are an ordinary static table beside them. After each step the program prints
how many ids the tables have.

It starts two processes on the CPU. On more, or on several machines, start it with torchrun:
``torchrun --nproc-per-node 4 -m tutorials.torchrec_intro``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

import torch_dynemb as td
from tutorials.ranks import run_on_ranks, silence, started_by_torchrun

silence()

import torchrec  # noqa: E402
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor  # noqa: E402
from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: E402
from torchrec.distributed.planner import ParameterConstraints, Topology  # noqa: E402
from torchrec.inference.modules import quantize_inference_model  # noqa: E402
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # noqa: E402
from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: E402

from torch_dynemb.torchrec import (  # noqa: E402
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingShardingPlanner,
    TableOptions,
    table_sizes,
)

DIM = 8
BATCH = 32  # samples of a rank
FEATURES = ["user", "seen products", "weekday"]


def main() -> None:
    """Run the tutorial on the ranks of torchrun, or on two that it starts."""
    if started_by_torchrun():
        tour()
    else:
        run_on_ranks(2, tour)


def tour() -> None:
    """Run all parts, on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        show_features()
        say("\n2. A plan: where each table lies, and which kernel it has.")
        model = shard(ClickModel(), FUSED_PARAMS)
        train_and_count(model)
        read_only(model)
        two_optimizers()
        quantized_inference(model)
        summary()
    finally:
        dist.destroy_process_group()


def say(*words: object) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


# -- 1. Features -----------------------------------------------------------------------------------


def batch(step: int, samples: int = BATCH) -> tuple[KeyedJaggedTensor, Tensor]:
    """Draw a rank's samples of a step: three features; one has bags of any length.

    User and product ids are whatever a log has: hashes, counters, database keys. Every step brings
    users that were never seen before, without numbers. People click at weekends.
    """
    size = (samples,)
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    users = torch.randint(-(2**63), 2**63 - 1, size, generator=generator)
    lengths = torch.randint(0, 4, size, generator=generator)
    new = 10**15 + 5 * step  # products come and go
    products = torch.randint(new, new + 30, (int(lengths.sum()),), generator=generator)
    weekdays = torch.randint(0, 7, size, generator=generator)
    ones = torch.ones(samples, dtype=torch.int64)
    features = KeyedJaggedTensor(
        keys=FEATURES,
        values=torch.cat([users, products, weekdays]),
        lengths=torch.cat([ones, lengths, ones]),
    )
    return features, (weekdays >= 5).float()


def show_features() -> None:
    """Show a KeyedJaggedTensor: values of all features in one tensor, lengths in another."""
    say("1. Features. Three samples, feature by feature, a bag of ids for each sample:")
    features, _ = batch(step=0, samples=3)
    for name, bags in features.to_dict().items():
        say(f"   {name}: {[bag.tolist() for bag in bags.to_dense()]}")


# -- 2. The model ----------------------------------------------------------------------------------


class ClickModel(nn.Module):
    """Three pooled embeddings side by side, and a linear layer.

    The collection is TorchRec's own and lies on the meta device: it has names, dims and features of
    tables, and no memory. Nothing in it says that two tables will be dynamic. Their
    ``num_embeddings`` bounds nothing; a planner counts it as the number of ids to expect.
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = {"users": 1_000_000, "products": 100_000, "weekdays": 7}
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=table,
                    embedding_dim=DIM,
                    num_embeddings=size,
                    feature_names=[feature],
                )
                for (table, size), feature in zip(sizes.items(), FEATURES, strict=True)
            ],
        )
        self.top = nn.Linear(len(FEATURES) * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return log-odds of a click, (B,)."""
        pooled = self.tables(features).to_dict()
        logits: Tensor = self.top(torch.cat([pooled[name] for name in FEATURES], dim=1))
        return logits.squeeze(1)


# -- 3. A plan, and DistributedModelParallel -------------------------------------------------------

# The optimizer of the tables, of static and dynamic ones alike. Rows are updated in the backward.
FUSED_PARAMS = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5}


def shard(model: nn.Module, fused_params: dict[str, Any] | None = None) -> nn.Module:
    """Plan where tables lie, and put them there.

    The sharder says which tables are dynamic, and with which options. TorchRec's constraints say
    how to shard them: each id of `users` lives on one rank, whichever its hash says (row_wise). All
    of `products` is on one rank (table_wise), at most 40 ids at a time: the one that was not seen
    for longest makes room for another. `weekdays` stays static.

    Args:
        model: On the meta device, as far as its tables go.
        fused_params: Optimizer of the tables that have none of their own.
    """
    uniform = td.Uniform(-0.1, 0.1)
    latest_40 = td.Policy(capacity=40, score="step")
    sharder = DynamicEmbeddingBagCollectionSharder(
        fused_params,
        tables=["users", "products"],
        options={
            "users": TableOptions(initializer=uniform),
            "products": TableOptions(initializer=uniform, policy=latest_40),
        },
    )
    types = {"users": "row_wise", "products": "table_wise", "weekdays": "table_wise"}
    topology = Topology(
        world_size=dist.get_world_size(),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        compute_device="cpu",
    )
    planner = DynamicEmbeddingShardingPlanner(
        topology=topology,
        batch_size=BATCH,
        constraints={
            table: ParameterConstraints(sharding_types=[kind]) for table, kind in types.items()
        },
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    for name, table in plan.plan["tables"].items():
        say(f"   {name}: {table.sharding_type}, {table.compute_kernel}, ranks {table.ranks}")
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )


def sizes(model: nn.Module) -> dict[str, int]:
    """Count the ids of every dynamic table, on all ranks together."""
    return {path.split(".")[-1]: size for path, size in table_sizes(model).items()}


# -- 4. Training -----------------------------------------------------------------------------------


def train(model: nn.Module, steps: Iterable[int]) -> None:
    """Train by the usual loop. One optimizer has the fused ones of the tables and the dense one."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    for step in steps:
        features, clicks = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(features), clicks)
        loss.backward()  # updates the rows of this batch, on the ranks that have them
        optimizer.step()  # updates the rest, and ends the step of the tables
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        say(f"   step {step}: loss {mean:.4f}, ids {sizes(model)}")


def train_and_count(model: nn.Module) -> None:
    """Train tables that begin empty: a row appears when its id is first looked up."""
    say("\n3. Training with fused_params. Before the first step:", sizes(model))
    say(f"   Every step has {dist.get_world_size() * BATCH} users that are new.")
    train(model, range(6))
    say("   users has grown with them; products has stopped at its capacity of 40.")


def read_only(model: nn.Module) -> None:
    """Evaluate: an unknown id reads as the row it would begin with, and is not inserted."""
    model.eval()
    with torch.no_grad():
        features, _ = batch(step=77, samples=3)
        odds = model(features)
    say("\n4. Evaluation with unknown users: log-odds", [round(x, 3) for x in odds.tolist()])
    say("   No ids were added:", sizes(model))
    model.train()


# -- 5. The other way to give optimizers -----------------------------------------------------------


def two_optimizers() -> None:
    """Give each table an optimizer of its own by apply_optimizer_in_backward, before sharding.

    Dynamic tables have Adam on the CPU as well, where FBGEMM has it on the GPU only.
    """
    say("\n5. Optimizers by table: Adam for users, SGD for the others.")
    model = ClickModel()
    tables = model.tables.embedding_bags
    apply_optimizer_in_backward(torch.optim.Adam, tables["users"].parameters(), {"lr": 0.01})
    for table in ("products", "weekdays"):
        apply_optimizer_in_backward(torch.optim.SGD, tables[table].parameters(), {"lr": 0.1})
    sharded = shard(model)
    train(sharded, range(2))


# -- 6. Inference ----------------------------------------------------------------------------------


def quantized_inference(model: nn.Module) -> None:
    """Make a read-only copy of the model in one process, for TorchRec's quantization.

    Every rank gets all rows, and needs no other any more. TorchRec quantizes the static table of
    the copy, and the dynamic ones become int8 with it.
    """
    say("\n6. Inference with int8 weights, without the other ranks.")
    frozen = td.freeze(model)
    int8 = quantize_inference_model(td.freeze(model))

    model.eval()
    features, _ = batch(step=3)
    with torch.no_grad():
        exact, quantized = model(features), int8(features)
    difference = (quantized - exact).abs().max()
    say(f"   Tables: {table_bytes(frozen):,} bytes, {table_bytes(int8):,} with rows of int8.")
    say(f"   Log-odds differ by at most {difference:.5f} from those of the model.")


def table_bytes(model: nn.Module) -> int:
    """Bytes of all tables of a copy, index included."""
    tables = {**dict(model.tables.named_buffers()), **dict(model.tables.named_parameters())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tables.values())


def summary() -> None:
    """Print what to remember."""
    say(
        f"""
To make a table of a TorchRec model dynamic (TorchRec {torchrec.__version__}):
   choose it            DynamicEmbeddingBagCollectionSharder(fused_params, tables=..., options=...)
   plan                 DynamicEmbeddingShardingPlanner().collective_plan(model, [sharder])
   shard                DistributedModelParallel(model, plan=plan, sharders=[sharder])
   look                 table_sizes(model), table_rows(model, "users")
   serve                td.freeze(model), then quantize_inference_model
   the rest             as ever: EmbeddingBagCollection, KeyedJaggedTensor, DMP, optimizers
Ids are any int64. A table grows with them, or keeps to a capacity; evaluation adds none."""
    )


if __name__ == "__main__":
    main()
