"""Jobs with tables of all kinds, and numpy tables that train beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from covering import Case
from seeding import seeded
from torch import Tensor, nn
from trained_twin import Floats, Twin

import torch_dynemb as td

IDS = [0, -1, 5, 2**63 - 1, -(2**63), *range(7, 22)]
PADDING = 5
ONCE = 500  # in one step before a save, and in one after the load
NEW = [*range(1000, 1020)]  # ids of a target before it loads, and of no training
MANY = [*range(2000, 2060)]  # make an index grow, and a cache overflow
INITIAL = 0.25
SAMPLES = 8
START = 100  # seconds
STEP_S = 10
STEPS = 2  # before the first save, and after the load

OPTIMIZERS: dict[str, td.optim.OptimizerConfig] = {
    "sgd": td.SGD(lr=0.5, stochastic_rounding=False),
    "adam": td.Adam(lr=0.1, eps=0.1, stochastic_rounding=False),
    "adam_row_steps": td.Adam(lr=0.1, eps=0.1, row_steps=True, stochastic_rounding=False),
    "adagrad": td.Adagrad(lr=0.5, initial_accumulator_value=0.1, stochastic_rounding=False),
    "row_wise_adagrad": td.RowWiseAdagrad(lr=0.5, stochastic_rounding=False),
    "momentum": td.MomentumSGD(lr=0.2, momentum=0.5, weight_decay=0.1, stochastic_rounding=False),
    "adam_bf16": td.Adam(lr=0.1, eps=0.1, state_dtype=torch.bfloat16, stochastic_rounding=False),
}
POLICIES = {
    "none": td.Policy(),
    "lru": td.Policy(score="step", capacity=16),
    "lfu": td.Policy(score=("frequency", "step"), capacity=16),
    "custom": td.Policy(score="custom", capacity=16),
    "ttl": td.Policy(score="timestamp", ttl=25),
    "admission": td.Policy(admission=td.AdmitFrequent(2)),
    "sketch": td.Policy(admission=td.AdmitFrequentSketch(2, memory="64KiB")),
}
EVICTS = {"lru": "step", "lfu": "frequency", "custom": "custom"}  # policy -> what decides
CAPACITIES = {"same": 16, "larger": 400, "smaller": 9}
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2}


@dataclass(frozen=True)
class Made:
    """How a model is made.

    Attributes:
        dtype, optimizer, policy: names; ``optimizer`` "none": not trainable.
        capacity: of a policy that evicts.
        ssd, split: whether rows lie in a store, and whether gradients wait for the step.
        shared: all ranks have one table, else each has its own.
    """

    dtype: str
    optimizer: str
    policy: str
    capacity: int
    ssd: bool
    split: bool
    shared: bool


def source_of(case: Case) -> Made:
    return Made(
        case["dtype"],
        case["optimizer"],
        case["policy"],
        CAPACITIES["same"],
        case["storage"] == "ssd",
        case["split"],
        case["source"] == "shared",
    )


def target_of(case: Case) -> Made:
    source = source_of(case)
    others = {
        "dtype": {"fp32": "bf16"}.get(source.dtype, "fp32"),
        "policy": "lfu" if source.policy == "none" else "none",
        "ssd": not source.ssd,
        "split": not source.split,
    }
    changed = {name: of for name, of in others.items() if case[f"target_{name}"] == "other"}
    optimizer = {
        "same": source.optimizer,
        "other": "adagrad" if source.optimizer != "adagrad" else "adam",
        "state_dtype": {"adam": "adam_bf16", "adam_bf16": "adam"}.get(source.optimizer, ""),
        "none": "none",
    }[case["target_optimizer"]]
    capacity = CAPACITIES[case["target_capacity"]]
    if case["target_policy"] == "other" or (case["target"] == "shared" and not source.shared):
        capacity = CAPACITIES["larger"]  # ranks divide it
    return replace(
        source,
        **changed,
        optimizer=optimizer,
        capacity=capacity,
        shared=case["target"] == "shared",
    )


class Job:
    """A model with one or two tables, and a twin of each."""

    def __init__(self, case: Case, made: Made, folder: str, seed: int = 0) -> None:
        self.case, self.made, self.kind = case, made, case["kind"]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.copies = 1  # of the model
        torch.manual_seed(seed)  # all ranks alike
        self.names = ["t", "u"] if self.kind in ("bags", "sequences") else ["t"]
        self.make(folder)
        universe = [*IDS, ONCE, *NEW, *MANY]
        begin = self._looked_up(dict.fromkeys(self.names, universe))
        self.twins = {
            name: Twin(
                OPTIMIZERS[made.optimizer if made.optimizer != "none" else "sgd"],
                TYPES[made.dtype],
                dict(zip(universe, begin[name].double().numpy(), strict=True)).__getitem__,
                PADDING if case["padding_idx"] else None,
                threshold=2 if made.policy in ("admission", "sketch") else 1,
                forgets=made.policy != "sketch",
                ttl=POLICIES[made.policy].ttl,
                now=START,
            )
            for name in self.names
        }

    def make(self, folder: str) -> None:
        """Make the model.

        Args:
            folder: of stores.
        """
        self.model: nn.Module = nn.ModuleDict(
            {"tables": self._tables(folder), "dense": nn.Linear(2, 1)}
        )
        if not self.made.shared:
            td.private_to_rank(self.model)
        self.take(self.model)
        if self.group.config.keeps_time:
            self.group.clock.set_now(START)

    def take(self, model: Any) -> None:
        """Go on with a model."""
        self.model, self.tables, self.group = model, model["tables"], model["tables"].group

    def _tables(self, folder: str) -> nn.Module:
        case, made = self.case, self.made
        policy = POLICIES[made.policy]
        if made.policy in EVICTS:
            policy = replace(policy, capacity=made.capacity)
        Path(folder).mkdir(exist_ok=True)
        storage = (
            td.SSDStore(f"{folder}/{self.rank}", cache="64 rows", segment="1MiB")
            if made.ssd
            else None
        )
        rows: dict[str, Any] = {
            "initializer": td.Constant(INITIAL) if case["initializer"] == "constant" else None,
            "padding_idx": PADDING if case["padding_idx"] else None,
            "policy": policy,
            "dtype": TYPES[made.dtype],
            "storage": storage,
        }
        module: dict[str, Any] = {
            "optimizer": OPTIMIZERS.get(made.optimizer),
            "trainable": made.optimizer != "none",
            "split": made.split,
            "process_group": dist.group.WORLD if made.shared else None,
            "max_rows": 1000 if case["memory"] == "max_rows" else None,
            "memory_budget": "1MiB" if case["memory"] == "budget" else None,
        }
        name = {"name": "items"} if case["named"] else {}
        if self.kind == "embedding":
            return td.DynamicEmbedding(4, **name, **rows, **module)
        if self.kind == "bag":
            return td.DynamicEmbeddingBag(4, mode="sum", **name, **rows, **module)
        dims = {"t": 4, "u": 4 if self.kind == "sequences" else 8}
        configs = [td.TableConfig(of, dim, **rows) for of, dim in dims.items()]
        if self.kind == "bags":
            return td.DynamicEmbeddingBagCollection(configs, **module)
        return td.DynamicEmbeddingCollection(configs, **module)

    def output(self, ids: Mapping[str, list[int]], custom: int | None = None) -> dict[str, Tensor]:
        """Return a row for each id.

        Args:
            ids: by table.
            custom: score of a training lookup.
        """
        if self.made.policy == "custom" and custom is not None:
            for name in self.names:
                self.group.scores.set_batch(self._number(name), custom)
        given = {name: torch.tensor(of)[:, None] for name, of in ids.items()}
        if self.kind == "embedding":
            return {"t": self.tables(given["t"])[:, 0]}
        if self.kind == "bag":
            return {"t": self.tables(given["t"])}
        found = self.tables(given)
        if self.kind == "bags":
            return dict(self.tables.split(found))
        return {name: of.reshape(-1, of.shape[-1]) for name, of in found.items()}

    def _looked_up(self, ids: Mapping[str, list[int]]) -> dict[str, Tensor]:
        """Return rows as in evaluation."""
        self.model.eval()
        with torch.no_grad():
            rows = self.output(ids)
        self.model.train()
        return rows

    def other_losses(self, outputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return what else is trained."""
        return []

    def end_step(self, now: int) -> None:
        """End a training step at a time."""
        self.tables.optimizer.step(now=now if self.group.config.keeps_time else None)

    def dim(self, name: str) -> int:
        """Return the columns of a table."""
        return self.group.config.tables[self._number(name)].embedding_dim

    # -- training ----------------------------------------------------------------------------

    def train(self, step: int, ids: list[int] = IDS, samples: int = SAMPLES) -> None:
        """Take a step with ids that depend on its number; collective."""
        ranks = [*range(self.world)] if self.made.shared else [0]
        batches = {of: self._batch(step, of, ids, samples) for of in ranks}
        mine = batches[self.rank if self.made.shared else 0]
        custom = 50 - step  # 49 of the last step before a change
        outputs = self.output({name: of[0] for name, of in mine.items()}, custom)
        losses = [(outputs[name] * of[1]).sum() for name, of in mine.items()]
        losses += self.other_losses(outputs)
        torch.stack(losses).sum().backward()
        now = self.twins["t"].now + STEP_S
        self.end_step(now)
        for name, twin in self.twins.items():
            gradients: dict[int, Floats] = {}
            seen: dict[int, int] = {}
            for of_rank in batches.values():
                given, of_ids = of_rank[name]
                for id, row in zip(given, of_ids.double().numpy() / len(ranks), strict=True):
                    gradients[id] = gradients.get(id, 0.0) + row
                    seen[id] = seen.get(id, 0) + self.copies
            twin.train(gradients, seen, custom)
            twin.now = now
        if self.made.policy in EVICTS:
            for name, twin in self.twins.items():
                twin.keep_only(self.ids(name))

    def _batch(
        self, step: int, rank: int, ids: list[int], samples: int
    ) -> dict[str, tuple[list[int], Tensor]]:
        random = seeded(10000 * self.case["seed"] + 100 * step + 10 * rank)
        found = {}
        for name in self.names:
            drawn = torch.randint(len(ids), (samples,), generator=random).tolist()
            once = ONCE if step in (0, STEPS + 1) and rank == 0 else ids[0]
            given = [ids[0], once, ids[0], *(ids[n] for n in drawn)]
            found[name] = (given, torch.randn(len(given), self.dim(name), generator=random))
        return found

    def change(self, change: str) -> None:
        """Change the tables as programs do; collective."""
        some = IDS[1:8]
        for name, twin in self.twins.items():
            table = self._number(name)
            gone: list[int] = []
            if change in ("erase", "compact"):
                self.group.erase(table, torch.tensor(some))
                gone = some
            elif change == "clear":
                self.group.clear(table)
                gone = [*twin.rows]
            elif change == "write":
                self._write(table, twin, some)
            elif change == "forget":
                if twin.ttl is not None:
                    self.group.remove(table, expired=True)
                    gone = [id for id in twin.rows if twin.expired(id)]
                if twin.threshold > 1:
                    self.group.reset_counts(table)
                    twin.waiting = {}
            for id in gone:
                twin.drop(id)
        if change == "compact":
            self.group.compact()
        elif change == "grow":
            self.train(30, MANY, 40)
        with torch.no_grad():
            for n, parameter in enumerate(self.model["dense"].parameters()):
                parameter.fill_(n + 2)

    def _write(self, table: int, twin: Twin, some: list[int]) -> None:
        self.group.fill(table, 0.75)
        twin.rows = {id: np.full_like(row, 0.75) for id, row in twin.rows.items()}
        here = self.group.contains(table, torch.tensor(some)).tolist()
        ids = [id for id, known in zip(some, here, strict=True) if known]
        dim = len(twin.initial(IDS[0]))
        of_ids = torch.tensor(ids, dtype=torch.int64)  # a rank may have none
        self.group.insert_or_assign(table, of_ids, torch.full((len(ids), dim), 0.5))
        for id in {*some} & {*twin.rows}:
            twin.assign(id, np.full(dim, 0.5), custom=49)

    # -- what it has -------------------------------------------------------------------------

    def ids(self, name: str) -> Tensor:
        """Return the ids of a table, of all ranks if they share it, ascending; collective."""
        parts = [batch.ids for batch in self.group.export(self._number(name))]
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
        if self.made.shared:
            of_ranks: list[Any] = [None] * self.world
            dist.all_gather_object(of_ranks, ids)
            ids = torch.cat(of_ranks)
        return ids.sort().values

    def ids_by_part(self, name: str) -> list[set[int]]:
        """Return the ids of parts that evict on their own; collective."""
        return [{*self.ids(name).tolist()}]

    def known(self, twin: Twin) -> list[int]:
        """Return the ids that :meth:`ids` has if the table is as its twin."""
        return sorted(twin.rows)

    def _number(self, name: str) -> int:
        return self.names.index(name)

    def differences(
        self, what: str, slack: Mapping[str, dict[int, float]] | None = None
    ) -> list[str]:
        """Return what differs from the twins; collective.

        Args:
            slack: by table and id: how far a row may be off.
        """
        universe = [*IDS, ONCE, *NEW, *MANY]
        rows = self._looked_up(dict.fromkeys(self.names, universe))
        tolerance = self.tolerance()
        found = []
        for name, twin in self.twins.items():
            ids, known = self.ids(name).tolist(), self.known(twin)
            if ids != known:
                lost, new = sorted({*known} - {*ids}), sorted({*ids} - {*known})
                found.append(f"{what}: {name} lacks {lost[:9]}, and has {new[:9]} besides")
            for id, row in zip(universe, rows[name].double().numpy(), strict=True):
                expected = twin.reads(id)
                limit = tolerance * (1 + np.abs(expected)) + (slack or {}).get(name, {}).get(id, 0)
                if not (np.abs(row - expected) <= limit).all():
                    found.append(f"{what}: {name}[{id}] is {row}, expected {expected}")
                    break
        return found

    def process_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that save and load together."""
        return dist.group.WORLD if self.made.shared else _own_group(self.rank)

    def saved_name(self, name: str) -> str:
        """Return the name of a table in a checkpoint."""
        return f"tables.{name}" if len(self.names) > 1 else "tables"

    def load_planner(self) -> Any:
        """Return the planner of torch.distributed.checkpoint; None: its default."""
        return None

    def end(self) -> None:
        """Give the model and its stores up."""
        del self.model, self.tables, self.group

    def tolerance(self) -> float:
        """Return how far values may be off, relatively."""
        tolerance = max(TOLERANCE[self.case["dtype"]], TOLERANCE[self.made.dtype])
        if "adam_bf16" in (self.case["optimizer"], self.made.optimizer):
            tolerance = max(tolerance, TOLERANCE["bf16"])
        return tolerance


_GROUPS: dict[dist.ProcessGroup, list[Any]] = {}  # of each rank alone, by the group of all


def _own_group(rank: int) -> dist.ProcessGroup | None:
    """Return a group of this rank alone."""
    everyone, size = dist.group.WORLD, dist.get_world_size()
    if size == 1:
        return everyone
    if everyone not in _GROUPS:
        _GROUPS[everyone] = [dist.new_group([of]) for of in range(size)]
    return _GROUPS[everyone][rank]
