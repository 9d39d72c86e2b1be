"""Jobs with sharded models of TorchRec, copies of them, and unsharded models of the same tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from covering import Case
from sharded_models import BAG_SHARDINGS, Model, Table, kernels, module_plan, plan_of, sharded
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingPlan
from trained_jobs import (
    CAPACITIES,
    EVICTS,
    INITIAL,
    MANY,
    OPTIMIZERS,
    PADDING,
    POLICIES,
    START,
    TYPES,
    Job,
    Made,
    source_of,
    target_of,
)
from trained_twin import FREQUENCIES, Twin

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicDMPCollection,
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    LoadPlanner,
    TableOptions,
    reshard,
    table_rows,
)

DIM = 16  # four columns for each of four ranks
VOCABULARY = 7  # of the static table
WITHOUT_POOLING = {  # what is nearest to a sharding of bags
    "table_column_wise": "column_wise",
    "table_row_wise": "row_wise",
    "grid_shard": "column_wise",
}
BY_COLUMNS = ("column_wise", "table_column_wise")
IN_A_NODE = ("table_row_wise", "grid_shard")


@dataclass(frozen=True)
class ShardedMade(Made):
    """How a model is made, and where.

    Attributes:
        where: ``"sharded"``; ``"replicas"``: two sharding groups; ``"td"``: without TorchRec.
        sharding: of table t; u has the next one.
        ranks: all of them.
    """

    where: str
    sharding: str
    ranks: int

    @property
    def group_size(self) -> int:
        """Return how many ranks share a table."""
        return self.ranks // 2 if self.where == "replicas" else self.ranks

    def sharding_of(self, name: str, pooling: str) -> str:
        """Return the sharding of a table."""
        place = BAG_SHARDINGS.index(self.sharding) + (name == "u")
        sharding = BAG_SHARDINGS[place % len(BAG_SHARDINGS)]
        in_a_node = self.where != "replicas" or self.group_size > 1
        if pooling == "sum" and in_a_node:
            return sharding
        return WITHOUT_POOLING.get(sharding, sharding)

    def shards(self, sharding: str) -> tuple[int, int]:
        """Return how many parts have the ids of a table, and how many its columns."""
        ranks = self.group_size
        hosts = 2 if self.where == "sharded" and ranks == 4 else 1
        if self.where == "td" or sharding == "row_wise":
            return ranks, 1
        if sharding in IN_A_NODE:
            return ranks // hosts, hosts if sharding == "grid_shard" else 1
        return 1, ranks if sharding in BY_COLUMNS else 1


def pooling_of(kind: str, name: str) -> str:
    """Return the pooling of a table in a kind of model."""
    unpooled = kind == "sequences" or (kind == "both" and name == "u")
    return "none" if unpooled else "sum"


def sharded_source(case: Case) -> ShardedMade:
    """Return how the model is made that is saved."""
    made = {**vars(source_of(case)), "shared": True}
    return ShardedMade(**made, where=case["source"], sharding=case["sharding"], ranks=case["ranks"])


def sharded_target(case: Case) -> ShardedMade:
    """Return how the model is made that loads it."""
    made = {**vars(target_of(case)), "shared": True}
    target = ShardedMade(
        **made,
        where=case["target"],
        sharding=case["target_sharding"],
        ranks=case["target_ranks"],
    )
    stays = case["save"] == "reshard"
    if case["target_capacity"] == "same" and not stays and not same_owners(case):
        target = replace(target, capacity=CAPACITIES["larger"])  # parts have more or fewer ids
    return target


def same_owners(case: Case) -> bool:
    """Return whether ids have the same parts where a model is saved and where it is loaded."""
    parts = []
    for side in ("", "target_"):
        where = case["source" if side == "" else "target"]
        made = replace(
            ShardedMade(**vars(source_of(case)), where=where, sharding="row_wise", ranks=1),
            sharding=case[f"{side}sharding"],
            ranks=case[f"{side}ranks"],
        )
        of = [made.shards(made.sharding_of(n, pooling_of(case["kind"], n)))[0] for n in "tu"]
        parts.append((of, where == "td" and max(of) > 1))
    return parts[0] == parts[1]


class Unsharded(nn.Module):
    """The model without TorchRec."""

    def __init__(self, kind: str, configs: Mapping[str, td.TableConfig], **options: Any) -> None:
        super().__init__()
        pooled = [of for name, of in configs.items() if pooling_of(kind, name) == "sum"]
        unpooled = [of for name, of in configs.items() if pooling_of(kind, name) == "none"]
        if pooled:
            self.bags = td.DynamicEmbeddingBagCollection(pooled, mode="sum", **options)
        if unpooled:
            self.sequences = td.DynamicEmbeddingCollection(unpooled, **options)

    def collections(self) -> list[Any]:
        """Return those of tables."""
        return [*self.children()]

    def forward(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs = {}
        if hasattr(self, "bags"):
            given = {name: ids[name][:, None] for name in self.bags.feature_names}
            outputs |= self.bags.split(self.bags(given))
        if hasattr(self, "sequences"):
            outputs |= self.sequences({name: ids[name] for name in self.sequences.feature_names})
        return outputs


class ShardedJob(Job):
    """A model with tables t and u, which TorchRec shards, and perhaps a static table s."""

    made: ShardedMade
    compares_state = compares_scores = True

    def make(self, folder: str) -> None:
        self.names = ["t", "u"]
        with patch("time.time", return_value=float(START)):
            if self.made.where == "td":
                model: Any = self._unsharded(folder)
            else:
                model = self._sharded(folder)
        self.model, self.copies = model, 1
        if self.made.where == "replicas":
            self.copies = self.world // model.sharding_group.size()
            self.world = model.sharding_group.size()
            self.rank = dist.get_rank(model.sharding_group)

    def __init__(self, case: Case, made: ShardedMade, folder: str, seed: int = 0) -> None:
        super().__init__(case, made, folder, seed)
        self._take_columns()

    def _take_columns(self) -> None:
        for name, twin in self.twins.items():
            twin.columns = self.made.shards(self._sharding(name))[1]

    def _sharding(self, name: str) -> str:
        return self.made.sharding_of(name, pooling_of(self.kind, name))

    def _policy(self) -> td.Policy:
        policy = POLICIES[self.made.policy]
        evicts = self.made.policy in EVICTS
        return replace(policy, capacity=self.made.capacity) if evicts else policy

    def _rows(self, storage: Any) -> dict[str, Any]:
        constant = self.case["initializer"] == "constant"
        return {
            "initializer": td.Constant(INITIAL) if constant else td.Normal(),
            "policy": self._policy(),
            "padding_idx": PADDING if self.case["padding_idx"] else None,
            "storage": storage,
        }

    def _unsharded(self, folder: str) -> nn.Module:
        made = self.made
        dtype = TYPES[made.dtype]

        def config(name: str) -> td.TableConfig:  # a collection has a store
            of = f"{folder}-{pooling_of(self.kind, name)}-{self.rank}"
            rows = self._rows(_store(of) if made.ssd else None)
            return td.TableConfig(name, DIM, dtype=dtype, **rows)

        model = Unsharded(
            self.kind,
            {name: config(name) for name in self.names},
            optimizer=OPTIMIZERS.get(made.optimizer),
            trainable=made.optimizer != "none",
            split=made.split,
            process_group=dist.group.WORLD if self.world > 1 else None,
        )
        model.register_buffer("dense", torch.zeros(1))
        for group in [of.group for of in model.collections()]:
            if group.config.keeps_time:
                group.clock.set_now(START)
        return model

    def planned(self) -> list[Table]:
        """Return the tables as TorchRec has them."""
        made = self.made
        tables = [
            Table(
                name,
                DIM,
                (name,),
                pooling_of(self.kind, name),
                self._sharding(name),
                data_type=made.dtype.upper(),
                num_embeddings=VOCABULARY,
            )
            for name in self.names
        ]
        if self.case["static"]:
            static = replace(tables[0], name="s", features=("s",), dynamic=False)
            tables.append(replace(static, data_type="FP32"))
        return tables

    def _sharded(self, folder: str) -> nn.Module:
        made, tables = self.made, self.planned()
        options = TableOptions(
            **self._rows(_store(folder) if made.ssd else None),
            trainable=made.optimizer != "none",
            split=made.split,
            score_from="weights" if made.policy == "custom" else None,
        )
        shared: dict[str, Any] = {
            "optimizer": OPTIMIZERS.get(made.optimizer),
            "options": dict.fromkeys(self.names, options),
            "fused_params": {"learning_rate": 0.1},
        }

        def prepare(model: nn.Module) -> None:
            model.register_buffer("dense", torch.zeros(1))

        if made.where == "sharded":
            return sharded(tables, prepare=prepare, **shared)
        model = Model(tables, weighted=False)
        prepare(model)
        sharders: list[Any] = [
            kind(**shared)
            for kind in (DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder)
        ]
        ranks = made.group_size
        plan = {}
        for (path, unpooled), sharder in zip(
            (("bags", False), ("sequences", True)), sharders, strict=True
        ):
            of = [table for table in tables if (table.pooling == "none") == unpooled]
            if of:
                plan[path] = module_plan(getattr(model, path), of, sharder, ranks=ranks)
        return DynamicDMPCollection(
            model,
            device=torch.device("cpu"),
            plan=ShardingPlan(plan),
            world_size=self.world,
            sharding_group_size=ranks,
            global_pg=dist.group.WORLD,
            sharders=sharders,
        )

    def output(self, ids: Mapping[str, list[int]], custom: int | None = None) -> dict[str, Tensor]:
        given = {name: torch.tensor(of) for name, of in ids.items()}
        if self.made.where == "td":
            if self.made.policy == "custom" and custom is not None:
                for group, number in self._groups():
                    group.scores.set_batch(number, custom)
            return dict(self.model(given))
        bags = len(given["t"])
        if self.case["static"]:
            given["s"] = torch.arange(bags) % VOCABULARY
        weights = None
        if self.made.policy == "custom" and custom is not None:
            weights = torch.full((len(given) * bags,), float(custom))
        lengths = torch.ones(len(given) * bags, dtype=torch.int64)
        values = torch.cat([*given.values()])
        return dict(self.model(KeyedJaggedTensor([*given], values, weights, lengths=lengths)))

    def _groups(self) -> Iterator[tuple[td.TableGroup, int]]:
        if self.made.where == "td":
            groups = [of.group for of in self.model.collections()]  # type: ignore[operator, union-attr]
        else:
            groups = [kernel.tables.group for kernel in kernels(self.model)]
        for group in groups:
            yield from ((group, number) for number in range(len(group.names)))

    def other_losses(self, outputs: Mapping[str, Tensor]) -> list[Tensor]:
        return [outputs["s"].float().sum()] if "s" in outputs else []

    def end_step(self, now: int) -> None:
        timed = POLICIES[self.made.policy].ttl is not None
        model: Any = self.model
        if self.made.where == "td":
            for collection in model.collections():
                collection.optimizer.step(now=now if timed else None)
        elif timed:
            for kernel in kernels(model):
                kernel.fused_optimizer.step(now=now)
        else:
            model.fused_optimizer.step()
        if self.made.where == "replicas":
            model.sync()

    def dim(self, name: str) -> int:
        return DIM

    def change(self, change: str) -> None:
        if change == "grow":
            self.train(30, MANY, 40)
        self.dense().fill_(3)

    def dense(self) -> Tensor:
        """Return the dense state."""
        return dict(self.model.named_buffers())[
            next(name for name, _ in self.model.named_buffers() if name.endswith("dense"))
        ]

    def static(self) -> Tensor:
        """Return the rows of the static table; collective."""
        self.model.eval()
        with torch.no_grad():
            rows = self.output(dict.fromkeys(self.names, [0] * VOCABULARY))["s"]
        self.model.train()
        return rows.float()

    def ids(self, name: str) -> Tensor:
        parts = [of.ids for of in table_rows(self.model, self.saved_name(name))]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).sort().values

    def known(self, twin: Twin) -> list[int]:
        return sorted(id for id in twin.rows if not twin.expired(id))

    def ids_by_part(self, name: str) -> list[set[int]]:
        own = table_rows(self.model, self.saved_name(name), gather=False)
        ids = [id for batch in own for id in batch.ids.tolist()]
        of_ranks: list[Any] = [None] * self.world
        dist.all_gather_object(of_ranks, ids, group=self.process_group())
        return [{*of} for of in of_ranks if of]

    def differences(
        self, what: str, slack: Mapping[str, dict[int, float]] | None = None
    ) -> list[str]:
        found = super().differences(what, slack)
        if found:
            return found
        for name, twin in self.twins.items():
            for batch in table_rows(self.model, self.saved_name(name)):
                for n, id in enumerate(batch.ids.tolist()):
                    found += self._wrong_values(f"{what}: {name}[{id}]", batch, n, twin, id)
        return found[:3]

    def _wrong_values(self, what: str, batch: Any, n: int, twin: Twin, id: int) -> list[str]:
        """Return what differs of an id's state and scores."""
        found = []
        if self.made.optimizer != "none" and self.compares_state:
            state = twin.state.get(id) or twin.initial_state(DIM)
            for tensor, expected in zip(twin.optimizer.state, state, strict=True):
                value = batch.state[tensor.name][n].double().numpy()
                if tensor.per_row:
                    expected = expected.mean()
                if not np.allclose(value, expected, self.tolerance(), self.tolerance()):
                    found.append(f"{what} has {tensor.name} {value}, expected {expected}")
        for word in POLICIES[self.made.policy].scores if self.compares_scores else ():
            if word in FREQUENCIES and int(batch.scores[word][n]) != twin.scores[id][word]:
                score = int(batch.scores[word][n])
                found.append(f"{what} has {word} {score}, expected {twin.scores[id][word]}")
        return found

    def end(self) -> None:
        del self.model

    def process_group(self) -> dist.ProcessGroup | None:
        if self.made.where == "replicas":
            group: dist.ProcessGroup = self.model.sharding_group  # type: ignore[assignment]
            return group
        return dist.group.WORLD

    @property
    def saves(self) -> bool:
        """Return whether this rank takes part in a save."""
        return self.made.where != "replicas" or bool(self.model.in_first_group)

    def saved_name(self, name: str) -> str:
        return ("bags." if pooling_of(self.kind, name) == "sum" else "sequences.") + name

    def load_planner(self) -> Any:
        return None if self.made.where == "td" else LoadPlanner()

    def reshard(self, made: ShardedMade) -> None:
        """Move the tables to other shards; collective."""
        self.made = made
        twins = self.twins
        plan = plan_of(self.planned())
        reshard(self.model, ShardingPlan(plan))  # type: ignore[arg-type]
        self.twins = {}
        for name, twin in twins.items():
            moved = replace(twin, columns=made.shards(self._sharding(name))[1])
            moved.take_state(twin)
            self.twins[name] = moved


def _store(folder: str) -> td.SSDStore:
    return td.SSDStore(folder, cache="64 rows", segment="1MiB")
