"""Saved tables of all kinds, loaded elsewhere, against numpy tables that train beside them.

The files of a checkpoint are also read with the library safetensors.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from covering import Case, Space
from seeding import seeded
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from trained_twin import FREQUENCIES, Floats, Twin

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.checkpoint import DeltaLog

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
FILES = ("save", "asynchronous", "increment")  # they leave a whole checkpoint
LOGS = ("log", "resume")
OBJECTS = ("pickle", "deepcopy")  # the target is a copy of the source
STATES = ("state_dict", "dcp", *OBJECTS)


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


def _source(case: Case) -> Made:
    return Made(
        case["dtype"],
        case["optimizer"],
        case["policy"],
        CAPACITIES["same"],
        case["storage"] == "ssd",
        case["split"],
        case["source"] == "shared",
    )


def _target(case: Case) -> Made:
    source = _source(case)
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
        torch.manual_seed(seed)  # all ranks alike
        self.model = nn.ModuleDict({"tables": self._tables(folder), "dense": nn.Linear(2, 1)})
        if not made.shared:
            td.private_to_rank(self.model)
        self.tables: Any = self.model["tables"]
        self.group: td.TableGroup = self.tables.group
        if self.group.config.keeps_time:
            self.group.clock.set_now(START)
        self.names = ["t", "u"] if self.kind in ("bags", "sequences") else ["t"]
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

    def _output(self, ids: Mapping[str, list[int]]) -> dict[str, Tensor]:
        """Return a row for each id."""
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
            rows = self._output(ids)
        self.model.train()
        return rows

    # -- training ----------------------------------------------------------------------------

    def train(self, step: int, ids: list[int] = IDS, samples: int = SAMPLES) -> None:
        """Take a step with ids that depend on its number; collective."""
        ranks = [*range(self.world)] if self.made.shared else [0]
        batches = {of: self._batch(step, of, ids, samples) for of in ranks}
        mine = batches[self.rank if self.made.shared else 0]
        custom = 50 - step  # 49 of the last step before a change
        for name in self.names if self.made.policy == "custom" else []:
            self.group.scores.set_batch(self._number(name), custom)
        outputs = self._output({name: of[0] for name, of in mine.items()})
        losses = [(outputs[name] * of[1]).sum() for name, of in mine.items()]
        torch.stack(losses).sum().backward()
        now = self.twins["t"].now + STEP_S
        self.tables.optimizer.step(now=now if self.group.config.keeps_time else None)
        for name, twin in self.twins.items():
            gradients: dict[int, Floats] = {}
            seen: dict[int, int] = {}
            for of_rank in batches.values():
                given, of_ids = of_rank[name]
                for id, row in zip(given, of_ids.double().numpy() / len(ranks), strict=True):
                    gradients[id] = gradients.get(id, 0.0) + row
                    seen[id] = seen.get(id, 0) + 1
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
            dim = self.group.config.tables[self._number(name)].embedding_dim
            found[name] = (given, torch.randn(len(given), dim, generator=random))
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
            ids = self.ids(name).tolist()
            if ids != sorted(twin.rows):
                lost, new = sorted({*twin.rows} - {*ids}), sorted({*ids} - {*twin.rows})
                found.append(f"{what}: {name} lacks {lost[:9]}, and has {new[:9]} besides")
            for id, row in zip(universe, rows[name].double().numpy(), strict=True):
                expected = twin.reads(id)
                limit = tolerance * (1 + np.abs(expected)) + (slack or {}).get(name, {}).get(id, 0)
                if not (np.abs(row - expected) <= limit).all():
                    found.append(f"{what}: {name}[{id}] is {row}, expected {expected}")
                    break
        return found

    def end(self) -> None:
        """Give the model and its stores up."""
        del self.model, self.tables, self.group

    def tolerance(self) -> float:
        """Return how far values may be off, relatively."""
        tolerance = max(TOLERANCE[self.case["dtype"]], TOLERANCE[self.made.dtype])
        if "adam_bf16" in (self.case["optimizer"], self.made.optimizer):
            tolerance = max(tolerance, TOLERANCE["bf16"])
        return tolerance


def check(rank: int, case: Case) -> list[str]:
    """Return where what was loaded differs from numpy; collective."""
    return check_as_given(rank, meant(case))


def check_as_given(rank: int, case: Case) -> list[str]:
    """Do so with combinations that are refused, too."""
    with TemporaryDirectory() as folder:
        of_first = [folder]
        dist.broadcast_object_list(of_first)
        try:
            found = _differences(rank, case, of_first[0])
        except CheckpointException as error:  # of a kind that programs do not catch
            raise RuntimeError(str(error)) from None
        finally:
            fsspec.filesystem("memory").store.clear()
        dist.barrier()  # before the folder goes
        return found


def meant(case: Case) -> Case:
    """Return a case without the values that its other values ignore or refuse."""
    case = dict(case)
    for said, names in WITHOUT:
        if said(case):
            case |= {name: SPACE.axes[name][0] for name in names}
    return case


def _differences(rank: int, case: Case, folder: str) -> list[str]:
    made = _source(case)
    own = folder if made.shared else f"{folder}/of-{rank}"
    Path(own).mkdir(exist_ok=True)
    source = Job(case, made, f"{own}/source")
    saving = Saving(case, source, own)
    for step in range(STEPS):
        source.train(step)
    saving.begin()
    source.change(case["changes"])
    source.train(STEPS)
    saved = copy.deepcopy(source.twins)
    saving.end()
    found = source.differences("the source")
    if case["save"] in FILES:
        found += _wrong_files(saving.path, source, saved)
    if case["save"] in OBJECTS:
        target = saving.copied()
    elif case["save"] == "snapshot":
        source.end()  # one model has the store
        target = Job(case, _target(case), f"{own}/source", seed=1)
    else:
        target = Job(case, _target(case), f"{folder}/target-{rank}", seed=1)
    if case["target_is"] == "used":
        target.train(20, NEW)
    dist.barrier()
    if case["save"] not in OBJECTS:
        saving.load(target, f"{folder}/of-0" if target.made.shared and not made.shared else own)
    if not torch.equal(target.model["dense"].bias, torch.full((1,), 3.0)):
        found.append("the dense state")
    slack = _take(case, source, target, saved)
    found += target.differences("loaded", slack)
    if target.made.optimizer != "none" and not slack and saving.resumes:
        for step in range(STEPS + 1, 2 * STEPS + 1):
            target.train(step)
        found += target.differences("trained on")
    saving.close()
    return found


def _take(
    case: Case, source: Job, target: Job, saved: dict[str, Twin]
) -> dict[str, dict[int, float]]:
    """Give the target's twins what was saved; return how far rows may be off."""
    slack: dict[str, dict[int, float]] = {}
    for name, twin in saved.items():
        own = target.twins[name]
        if case["save"] == "log":
            for id in _left_out(case, twin):
                twin.drop(id)
            if case["log_rows"]:
                slack[name] = {
                    id: _rounding(case["log_rows"], row) for id, row in twin.rows.items()
                }
        own.rows, own.scores, own.waiting = twin.rows, twin.scores, twin.waiting
        own.now, own.steps, own.initial = twin.now, twin.steps, twin.initial
        own.convert(own.dtype)
        if case["target_optimizer"] in ("same", "state_dtype"):
            own.state = twin.state
        else:
            own.restart_optimizer(own.optimizer)
        if target.made.policy not in ("admission", "sketch"):
            own.waiting = {}
        if case["target_capacity"] == "smaller":
            _keep_best(target, name, own)
    return slack


def _keep_best(target: Job, name: str, twin: Twin) -> None:
    """Keep what a smaller table has, if these are ids with the highest scores."""
    word = EVICTS[target.made.policy]
    ids = {*target.ids(name).tolist()}
    gone = {*twin.rows} - ids
    least = min((twin.scores[id][word] for id in ids & {*twin.rows}), default=0)
    if not gone or len(ids) >= target.made.capacity // 2:
        for id in gone:
            if twin.scores[id][word] <= least:
                twin.drop(id)


def _left_out(case: Case, twin: Twin) -> list[int]:
    """Return the ids that a log with ``keep`` leaves out."""
    of = {id: twin.scores[id]["frequency"] for id in twin.rows}
    if case["log_keep"] == "at_least":
        return [id for id, frequency in of.items() if frequency < 3]
    if case["log_keep"] == "top":
        return sorted(of, key=lambda id: (-of[id], id))[5:]
    return []


def _rounding(form: str, row: Floats) -> float:
    """Return how far a row in a form of a log may be off."""
    if form == "fp16":
        return float(np.abs(row).max() * 2**-11)
    return float((row.max() - row.min()) / 255 * 0.501)


class Saving:
    """What a program does to save a job and to load it."""

    def __init__(self, case: Case, source: Job, folder: str) -> None:
        self.case, self.source, self.how = case, source, case["save"]
        roots = {"path": folder, "file": f"file://{folder}", "memory": f"memory:/{folder}"}
        self.root = roots[case["place"]]
        self.path = f"{self.root}/{'both' if self.how == 'increment' else 'last'}"
        shared = source.made.shared
        self.group = dist.group.WORLD if shared else _own_group(source.rank)
        self.state = (
            {"step": 1, "of": [torch.arange(3), ("a", None, 0.5)]} if case["state"] else None
        )
        self.log: DeltaLog | None = None
        counts = POLICIES[case["policy"]].admission is not None  # of which a log has none
        self.resumes = self.how != "log" or (case["log_optimizer_state"] and not counts)

    def _save(self, path: str, **options: Any) -> checkpoint.SaveHandle:
        model = self.source.model
        wrapped = checkpoint_wrapper(model) if self.case["wrapped"] else model
        return checkpoint.save(path, wrapped, process_group=self.group, state=self.state, **options)

    def begin(self) -> None:
        """Save, or begin to record, what will have changed at the end."""
        model = self.source.model
        if self.how == "increment":
            checkpoint.record_changes(model)
            self._save(f"{self.root}/first")
        elif self.how in LOGS:
            case = self.case
            keep = {
                None: None,
                "at_least": td.AtLeast(3, by="frequency"),
                "top": td.Top(5, by="frequency"),
            }[case["log_keep"]]
            names = [_saved_name(self.source, name) for name in self.source.names]
            self.log = DeltaLog(
                f"{self.root}/log",
                optimizer_state=case["log_optimizer_state"],
                rows=case["log_rows"],
                keep=keep,
                tables=names if case["log_tables"] else None,
                retain=1 if case["log_retain"] else None,
                resume=self.how == "resume",
                process_group=self.group,
            )
            self.base = "base"
            self.log.attach(model, state=self.state if self.how == "resume" else None)
        elif self.how in FILES:
            self._save(self.path)  # the last one replaces it
        elif self.how == "snapshot":
            checkpoint.save_snapshot(model, "first", process_group=self.group)

    def end(self) -> None:
        """Save what there is now."""
        model = self.source.model
        if self.how == "asynchronous":
            handle = self._save(self.path, asynchronous=True)
            self.source.train(10)  # while a thread writes
            handle.wait()
        elif self.how == "save":
            self._save(self.path)
        elif self.how == "increment":
            self._save(f"{self.root}/second", since=f"{self.root}/first")
            if self.source.rank == 0 or not self.source.made.shared:
                checkpoint.merge(
                    [f"{self.root}/first", f"{self.root}/second"],
                    self.path,
                    parts=3 if self.case["merged_parts"] else None,
                )
        elif self.log is not None:
            given = {"state": self.state} if self.how == "resume" else {}
            self.log.publish(**given)
            if self.case["log_retain"]:
                self.base = f"base-{self.log.save(**given):020}"
            self.log.flush()
        elif self.how == "snapshot":
            checkpoint.save_snapshot(
                model, "second", state=self.state, keep=2, process_group=self.group
            )
        elif self.how == "state_dict":
            self._file = io.BytesIO()
            torch.save({"model": model.state_dict()}, self._file)
        elif self.how == "pickle":
            self._file = io.BytesIO(pickle.dumps(model))
        elif self.how == "deepcopy":
            self._copy = copy.deepcopy(model)
        elif self.how == "dcp":
            dcp.save(model.state_dict(), checkpoint_id=self.path, process_group=self.group)
        self.source.train(11)  # the source goes on

    def copied(self) -> Job:
        """Return a job with a copy of the source's model."""
        model = pickle.load(self._file) if self.how == "pickle" else self._copy
        target = copy.copy(self.source)
        target.model, target.tables, target.group = model, model["tables"], model["tables"].group
        target.twins = copy.deepcopy(self.source.twins)
        return target

    def load(self, target: Job, folder: str) -> None:
        """Load into another model.

        Args:
            target: its job.
            folder: of the source, as :class:`Saving` takes it.
        """
        case = self.case
        group = dist.group.WORLD if target.made.shared else _own_group(target.rank)
        there = Saving(case, self.source, folder)
        state: Any = None
        if self.how in FILES:
            state = checkpoint.load(
                there.path,
                target.model,
                process_group=group,
                optimizer_state=case["target_optimizer"] in ("same", "state_dtype"),
                on_missing_state=case["on_missing_state"],
            ).state
        elif self.how == "log":
            state = self.state  # replay has none
            if case["followed"]:
                base = f"{there.root}/log/{self.base}"
                checkpoint.load(
                    base,
                    target.model,
                    process_group=group,
                    optimizer_state=case["target_optimizer"] == "same",
                )
                checkpoint.follow(f"{there.root}/log", target.model, base=base).update()
            else:
                checkpoint.replay(f"{there.root}/log", target.model)
        elif self.how == "resume":
            state = checkpoint.resume(f"{there.root}/log", target.model, process_group=group).state
        elif self.how == "snapshot":
            state = checkpoint.load_snapshot(target.model, process_group=group).state
        elif self.how == "state_dict":
            state = self.state
            self._file.seek(0)
            target.model.load_state_dict(torch.load(self._file, weights_only=True)["model"])
        elif self.how == "dcp":
            state = self.state
            loaded = target.model.state_dict()
            dcp.load(loaded, checkpoint_id=self.path, process_group=group)
            target.model.load_state_dict(loaded)
        assert str(state) == str(self.state), f"state= is {state}"

    def close(self) -> None:
        """End the log."""
        if self.log is not None:
            self.log.close()


_GROUPS: dict[dist.ProcessGroup, list[Any]] = {}  # of each rank alone, by the group of all


def _own_group(rank: int) -> dist.ProcessGroup | None:
    """Return a group of this rank alone."""
    everyone, size = dist.group.WORLD, dist.get_world_size()
    if size == 1:
        return everyone
    if everyone not in _GROUPS:
        _GROUPS[everyone] = [dist.new_group([of]) for of in range(size)]
    return _GROUPS[everyone][rank]


def _saved_name(job: Job, name: str) -> str:
    return f"tables.{name}" if len(job.names) > 1 else "tables"


def _wrong_files(path: str, source: Job, saved: Mapping[str, Twin]) -> list[str]:
    """Return what other libraries read of a checkpoint that differs from the twins."""
    files, root = fsspec.core.url_to_fs(path)
    manifest = json.loads(files.cat_file(f"{root}/manifest.json"))
    names = {_saved_name(source, name): name for name in saved}
    if manifest["kind"] != "full" or {*manifest["tables"]} != {*names}:
        return [f"the manifest has {manifest['kind']} {[*manifest['tables']]}"]
    rows: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in saved}
    waiting: dict[str, dict[int, int]] = {name: {} for name in saved}
    for file in files.find(root):
        *_, folder, name = file.split("/")
        if folder not in names or name.startswith("sketch"):
            continue
        tensors = safetensors.torch.load(files.cat_file(file))
        ids = tensors.pop("id").tolist()
        if name.startswith("counts"):
            waiting[names[folder]].update(zip(ids, tensors["count"].tolist(), strict=True))
            continue
        if tensors["weight"].dtype != TYPES[source.made.dtype]:
            return [f"{file} has rows of {tensors['weight'].dtype}"]
        values = {of: tensor.double().numpy() for of, tensor in tensors.items()}
        for n, id in enumerate(ids):
            rows[names[folder]][id] = {key: value[n] for key, value in values.items()}
    found = []
    for name, twin in saved.items():
        if {*rows[name]} != {*twin.rows}:
            found.append(f"files of {name} have ids {sorted(rows[name])}")
            continue
        if source.made.policy == "admission" and waiting[name] != twin.waiting:
            found.append(f"files of {name} have counts {waiting[name]}, expected {twin.waiting}")
        for id, values in rows[name].items():
            expected = {"weight": twin.rows[id]}
            names_of_state = [of.name for of in twin.optimizer.state]
            expected |= zip(
                [f"state.{of}" for of in names_of_state], twin.state.get(id, ()), strict=False
            )
            for word in POLICIES[source.made.policy].scores:
                if word in FREQUENCIES:
                    expected[f"score.{word}"] = np.array(twin.scores[id][word])
            for of, value in expected.items():
                if of not in values or not np.allclose(
                    values[of], value, rtol=source.tolerance(), atol=source.tolerance()
                ):
                    found.append(f"files of {name} have {of} {values.get(of)} of {id}: {value}")
    return found[:3]


TABLES = ("target_dtype", "target_policy", "target_optimizer")
LOG = ("log_optimizer_state", "log_rows", "log_keep", "log_tables", "followed")
WITHOUT: list[tuple[Callable[[Case], bool], Sequence[str]]] = [  # when -> axes that are plain then
    # ignored
    (lambda c: c["save"] not in FILES, ["wrapped", "on_missing_state"]),
    (lambda c: c["save"] not in (*FILES, *LOGS), ["place"]),
    (lambda c: c["place"] == "memory" and c["ranks"] > 1, ["place"]),  # of one process
    (lambda c: c["save"] not in (*FILES, "resume", "snapshot"), ["state"]),
    (lambda c: c["save"] != "increment", ["merged_parts"]),
    (lambda c: c["save"] not in LOGS, ["log_retain"]),
    (lambda c: c["save"] != "log", LOG),
    (lambda c: c["policy"] != "lfu", ["log_keep"]),
    (lambda c: c["policy"] not in EVICTS or c["target_policy"] == "other", ["target_capacity"]),
    (
        lambda c: (
            c["target_optimizer"] == "state_dtype" and c["optimizer"] not in ("adam", "adam_bf16")
        ),
        ["target_optimizer"],
    ),
    (lambda c: c["target_optimizer"] == "none", ["target_is"]),  # it cannot be trained before
    (lambda c: c["save"] in (*OBJECTS, "snapshot"), ["target_split", "target_is"]),
    (lambda c: c["save"] == "log" and c["policy"] == "ttl", ["policy"]),  # a log has no times
    (
        lambda c: c["target_capacity"] == "smaller" and c["target"] == "shared",
        ["target_capacity"],  # each rank evicts the worst of its own
    ),
    # refused: see REFUSED
    (lambda c: c["save"] in ("increment", *LOGS, *STATES), ["storage"]),
    (lambda c: c["save"] in (*STATES, "snapshot"), [*TABLES, "target_ssd", "target_capacity"]),
    (lambda c: c["save"] == "resume", TABLES),
    (lambda c: c["save"] == "log" and c["target_capacity"] == "smaller", ["target_capacity"]),
    (
        lambda c: c["save"] == "log" and (c["log_optimizer_state"] or not c["followed"]),
        ["target_optimizer"],
    ),
    (lambda c: c["target_policy"] == "other", ["on_missing_state"]),
    (lambda c: c["policy"] == "custom", ["source", "target"]),
]
REFUSED = {  # as the pages say
    "save=increment storage=ssd": "save_snapshot, which writes changed rows only",
    "save=log storage=ssd": "save_snapshot, which writes changed rows only",
    "save=resume storage=ssd": "call torch_dynemb.checkpoint.save_snapshot",
    "save=state_dict storage=ssd": "save the model with torch_dynemb.checkpoint.save",
    "save=deepcopy storage=ssd": "save the model with torch_dynemb.checkpoint.save",
    "save=snapshot": "no table of the model has storage=SSDStore",
    "save=snapshot storage=ssd target_dtype=other": "Give the tables another path",
    "save=snapshot storage=ssd target_policy=other": "tables as they were when it was saved",
    "save=snapshot storage=ssd target_optimizer=other": "Give the tables another path",
    "save=state_dict target_dtype=other": "construct it as it was when it was saved",
    "save=state_dict target_policy=other": "construct it as it was when it was saved",
    "save=state_dict target_optimizer=other": "construct it as it was when it was saved",
    "save=state_dict policy=lru target_capacity=smaller": "construct it with a larger",
    "save=dcp target_optimizer=other": "Missing key in checkpoint",
    "save=resume target_dtype=other": "give the model that was published",
    "save=resume target_policy=other": "give the model that was published",
    "save=resume target_optimizer=other": "give the model that was published",
    "save=log target_optimizer=other": "give optimizer_state=False to load the rows alone",
    "save=log policy=lru target_capacity=smaller": "give it the capacity of the table",
    "target_policy=other on_missing_state=error": "give on_missing_state='fresh'",
    "policy=custom source=shared": "leave that score or process_group out",
}


SPACE = Space(
    "saving",
    axes={
        "ranks": [1, 2],
        "save": [*FILES, *LOGS, "snapshot", *STATES],
        "kind": ["embedding", "bag", "bags", "sequences"],
        "optimizer": list(OPTIMIZERS),
        "dtype": list(TYPES),
        "split": [False, True],
        "policy": list(POLICIES),
        "storage": ["none", "ssd"],
        "initializer": ["constant", "default"],
        "padding_idx": [False, True],
        "memory": ["default", "max_rows", "budget"],
        "named": [False, True],
        "changes": ["none", "erase", "clear", "write", "forget", "compact", "grow"],
        "source": ["alone", "shared"],
        "target": ["alone", "shared"],
        "target_is": ["new", "used"],
        "target_dtype": ["same", "other"],
        "target_policy": ["same", "other"],
        "target_capacity": list(CAPACITIES),
        "target_ssd": ["same", "other"],
        "target_split": ["same", "other"],
        "target_optimizer": ["same", "other", "state_dtype", "none"],
        "place": ["path", "file", "memory"],
        "wrapped": [False, True],
        "state": [False, True],
        "on_missing_state": ["fresh", "error"],
        "merged_parts": [False, True],
        "log_optimizer_state": [False, True],
        "log_rows": [None, "int8", "fp16"],
        "log_keep": [None, "at_least", "top"],
        "log_tables": [False, True],
        "log_retain": [False, True],
        "followed": [False, True],
    },
    constraints=[
        # files of one rank are not those of others
        lambda ranks, save, source, target: (
            ranks == 1 or save not in (*STATES, "snapshot") or source == target
        ),
        lambda ranks, save, target: ranks == 1 or save != "log" or target == "shared",
        lambda ranks, save, policy: ranks == 1 or save != "log" or policy != "custom",  # not shared
        lambda save, storage: save != "snapshot" or storage == "ssd",
    ],
    check=check,
    public=[
        checkpoint.save,
        checkpoint.load,
        checkpoint.merge,
        checkpoint.record_changes,
        checkpoint.save_snapshot,
        checkpoint.load_snapshot,
        checkpoint.replay,
        checkpoint.follow,
        checkpoint.resume,
        DeltaLog,
        td.SingleTableOptions,
    ],
    without_axis={
        **dict.fromkeys(("path", "paths", "out", "since", "log", "base"), "axes save and place"),
        "model": "axis kind",
        "process_group": "axes source and target",
        "asynchronous": "axis save",
        "resume": "axis save",
        "progress": "shows a bar: test_inspection.py",
        "strict": "is about other tables: test_checkpoints.py",
        "optimizer_state": "axes target_optimizer and log_optimizer_state",
        "parts": "axis merged_parts",
        "rows": "axis log_rows",
        "keep": "axis log_keep; of snapshots: test_stored_tables.py",
        "tables": "axis log_tables",
        "retain": "axis log_retain",
        "sequence": "begins at a commit: test_following_live.py",
        "until": "ends at a commit: test_delta_log.py",
        "dense": "keeps the dense state: test_delta_log.py",
        "every_steps": "says when to publish: test_delta_log_publishing.py",
        "every_seconds": "says when to publish: test_delta_log_publishing.py",
        "name": "axis named",
        "max_rows": "axis memory",
        "memory_budget": "axis memory",
        "trainable": "axis target_optimizer",
        "eval_default": "is not saved: modules_space.py",
        "output_dtype": "is not saved: modules_space.py",
        "device": "loads between devices: test_checkpoints.py",
    },
)
