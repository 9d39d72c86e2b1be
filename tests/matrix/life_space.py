"""Lives of a table: policies, removals, copies and training, beside a model in float64.

The model follows the pages on policies and keeps a dict of ids. It knows no handles, buckets or
slots. Tables are so small that eviction compares all ids.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from covering import Case, Space
from seeding import seeded

import torch_dynemb as td
from torch_dynemb.nn.options import SingleTableOptions

IDS, DIM, STEPS, BATCH = 14, 3, 7, 6
LR, EPS, START = 0.5, 1e-8, 0.25
HALF_LIFE = 50  # steps: more than a life, so that only equal histories have equal counts
TTL, SECONDS = 15, 10  # a step takes 10 seconds, so that no id is looked at when it expires

OPTIMIZERS = {"sgd": td.SGD(lr=LR), "adagrad": td.Adagrad(lr=LR, eps=EPS)}
ADMISSION = {"all": None, "exact": td.AdmitFrequent(2), "sketch": td.AdmitFrequentSketch(2, "1MB")}
SCORES: dict[str, Any] = {
    "step": {"score": "step"},
    "timestamp": {"score": "timestamp"},
    "frequency": {"score": "frequency"},
    "custom": {"score": "custom"},
    "sum": {"score": td.Custom(combine="sum")},
    "max": {"score": td.Custom(combine="max")},
    "decayed": {"score": "decayed", "half_life_steps": HALF_LIFE},
    "two": {"score": ("frequency", "timestamp")},
    "none": {"score": "none"},
}


@dataclass
class Row:
    """What an id has."""

    weights: np.ndarray
    squares: np.ndarray
    step: int = 0
    seen_at: int = 0
    frequency: int = 0
    custom: int = 0
    decayed: float = 0.0  # as of step 0

    def score(self, name: str, step: int) -> float:
        values = {"step": self.step, "timestamp": self.seen_at, "frequency": self.frequency}
        values |= {"custom": self.custom, "decayed": self.decayed * 2 ** (-step / HALF_LIFE)}
        return values[name]


@dataclass
class Life:
    """The model of a table."""

    case: Case
    rows: dict[int, Row] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    step: int = 0
    now: int = 1000
    evicted: int = 0
    rejected: int = 0
    not_admitted: int = 0

    def policy(self) -> td.Policy:
        case = self.case
        bound = {"capacity": case["capacity"]}
        if case["capacity"] is not None:
            bound |= {"on_full": case["on_full"], "protected_steps": case["protected_steps"]}
        return td.Policy(
            **SCORES[case["score"]],
            **bound,
            admission=ADMISSION[case["admission"]],
            refused=case["refused"],
            ttl=TTL if case["ttl"] else None,
        )

    def deciding(self) -> str:
        first = self.policy().scores[0]
        return "custom" if first not in ("step", "timestamp", "frequency", "decayed") else first

    def look_up(self, ids: list[int], given: int) -> None:
        """Training of a batch, without its update."""
        counts = {id: ids.count(id) for id in ids}
        for id in counts.keys() & self.rows.keys():
            self._touch(self.rows[id], counts[id], given, new=False)
        for id in [id for id in counts if id not in self.rows]:
            total = counts[id] + self.waiting.get(id, 0)
            counted = self.case["admission"] != "all"
            if counted and total < 2:
                self.not_admitted += 1
            elif self._make_room():
                row = Row(np.full(DIM, START), np.zeros(DIM))
                self._touch(row, total, given, new=True, brought=counts[id])
                self.rows[id] = row
                if self.case["admission"] == "exact":
                    self.waiting.pop(id, None)
                continue
            else:
                self.rejected += 1
            if counted:
                self.waiting[id] = total

    def _touch(
        self, row: Row, count: int, given: int, *, new: bool, brought: int | None = None
    ) -> None:
        """Note occurrences: ``count``, those before admission among them; this call's, if fewer."""
        row.step, row.seen_at = self.step, self.now
        row.frequency += count
        row.decayed += count * 2 ** (self.step / HALF_LIFE)
        if self.case["score"] == "sum":
            row.custom += given * (brought or count)
        elif self.case["score"] == "max":
            row.custom = given if new else max(row.custom, given)
        else:
            row.custom = given

    def _make_room(self) -> bool:
        capacity, on_full = self.case["capacity"], self.case["on_full"]
        if capacity is None or on_full == "grow" or len(self.rows) < capacity:
            return True
        safe = self.step - self.case["protected_steps"]
        name = self.deciding()
        old = [
            (round(row.score(name, self.step), 6), row.step, id)
            for id, row in self.rows.items()
            if row.step <= safe
        ]
        if on_full == "default" or not old:
            return False
        del self.rows[min(old)[2]]
        self.evicted += 1
        return True

    def update(self, ids: list[int], gradients: np.ndarray) -> None:
        for id in dict.fromkeys(ids):
            if id not in self.rows:
                continue
            row = self.rows[id]
            gradient = sum(gradients[place] for place, other in enumerate(ids) if other == id)
            if self.case["optimizer"] == "adagrad":
                row.squares = row.squares + gradient**2
                gradient = gradient / (np.sqrt(row.squares) + EPS)
            row.weights = row.weights - LR * gradient

    def expired(self, id: int) -> bool:
        return self.case["ttl"] and self.now > self.rows[id].seen_at + TTL

    def value(self, id: int, *, training: bool) -> np.ndarray:
        """Row of an id as a lookup reads it."""
        if id in self.rows and (training or not self.expired(id)):
            return self.rows[id].weights
        default = self.case["refused"] if training else self.case["eval_default"]
        return np.full(DIM, START if default == "initial" else 0.0)

    def keep(self, kept: Any) -> None:
        self.rows = {id: row for id, row in self.rows.items() if kept(id)}


class Lived:
    """A module with such a table, and its model."""

    def __init__(self, case: Case) -> None:
        self.case, self.life = case, Life(case)
        self.module = self.new_module()
        self.timed = case["ttl"] or case["score"] in ("timestamp", "two")
        self.custom = case["score"] in ("custom", "sum", "max")
        self.random = seeded(case["seed"] + 5)
        self.wrong: list[str] = []
        self.noted = self.statistics()

    def new_module(self) -> td.DynamicEmbedding:
        case = self.case
        return td.DynamicEmbedding(
            DIM,
            name="t",
            optimizer=OPTIMIZERS[case["optimizer"]],
            policy=self.life.policy(),
            initializer=td.Constant(START),
            eval_default=case["eval_default"],
            split=case["split"],
        )

    def statistics(self) -> dict[str, int]:
        found = self.module.group.usage.tables(wait=True)["t"]
        return {name: getattr(found, name) for name in ("evicted", "rejected", "not_admitted")}

    def tell(self, what: str, given: Any, expected: Any) -> None:
        if given != expected:
            self.wrong.append(f"step {self.life.step}: {what} is {given}, expected {expected}")

    def close(self, what: str, given: Any, expected: Any) -> None:
        if not np.allclose(given, expected, rtol=1e-5, atol=1e-6):
            self.tell(what, np.asarray(given).round(5).tolist(), np.round(expected, 5).tolist())

    def train(self) -> None:
        life, group = self.life, self.module.group
        drawn = torch.randint(IDS, (BATCH,), generator=self.random)
        ids = drawn.tolist()
        given = int(torch.randint(1, 9, (), generator=self.random))
        if self.timed:
            group.clock.set_now(life.now)
        if self.custom:
            group.scores.set_batch("t", given)
        life.look_up(ids, given)
        output = self.module(drawn.to(group.device))
        self.close("output", output.detach().cpu(), [life.value(id, training=True) for id in ids])
        weights = torch.linspace(-1, 1, BATCH * DIM, device="cpu").view(BATCH, DIM)
        (output * weights.to(output.device)).sum().backward()
        life.update(ids, weights.double().numpy())
        self.module.optimizer.step()
        change = {name: value - self.noted[name] for name, value in self.statistics().items()}
        self.tell("counts", change, {name: getattr(life, name) for name in change})
        life.evicted = life.rejected = life.not_admitted = 0
        life.step += 1
        life.now += SECONDS
        if self.timed:
            group.clock.set_now(life.now)

    def act(self) -> None:
        """Do what the case does between steps."""
        action, life, group = self.case["between"], self.life, self.module.group
        if action == "erase":
            gone = {1, 4, life.step}
            group.erase("t", torch.tensor(sorted(gone), device=group.device))
            life.keep(lambda id: id not in gone)
        elif action == "remove":
            group.remove("t", predicate=lambda ids, _: ids % 5 == life.step % 5)
            life.keep(lambda id: id % 5 != life.step % 5)
        elif action == "expire":
            removed = group.remove("t", expired=True)
            self.tell("removed", removed, sum(life.expired(id) for id in life.rows))
            life.keep(lambda id: not life.expired(id))
        elif action == "clear" and life.step == STEPS // 2:
            group.clear("t")
            life.keep(lambda id: False)
        elif action == "compact":
            group.compact()
        elif action == "reserve":
            group.reserve("t", 30 * life.step)
        elif action == "materialize":
            group.materialize()
        elif action == "copy":
            self.module = copy.deepcopy(self.module)
        elif action == "pickle":
            self.module = pickle.loads(pickle.dumps(self.module))
        elif action == "state_dict":
            other = self.new_module()
            other.load_state_dict(self.module.state_dict())
            other.optimizer.load_state_dict(self.module.optimizer.state_dict())
            self.module = other
        elif action == "save":
            other = self.new_module()
            with tempfile.TemporaryDirectory() as folder:
                td.checkpoint.save(f"{folder}/saved", self.module)
                td.checkpoint.load(f"{folder}/saved", other)
            self.module = other
        if self.timed:
            self.module.group.clock.set_now(life.now)

    def check(self) -> None:
        life, group = self.life, self.module.group
        ids = torch.arange(IDS, device=group.device)
        exported = [id for batch in group.export("t") for id in batch.ids.tolist()]
        self.tell("ids", sorted(exported), sorted(life.rows))
        self.tell("size", group.size("t"), len(life.rows))
        self.module.eval()
        with torch.no_grad():
            read = self.module(ids).cpu()
        self.module.train()
        self.close("eval", read, [life.value(id, training=False) for id in range(IDS)])
        names = [] if self.case["score"] == "none" else self.life.policy().scores
        for name in names:
            known = "custom" if name not in ("step", "timestamp", "frequency", "decayed") else name
            found = group.scores.get("t", ids, score=name)
            expected = [
                life.rows[id].score(known, life.step) if id in life.rows else 0.0
                for id in range(IDS)
            ]
            self.close(name, found.scores.double().cpu(), expected)
        self.noted = self.statistics()


def check_life(rank: int, case: Case) -> list[str]:
    """Return what differs from the model in a life of some steps."""
    lived = Lived(case)
    for _ in range(STEPS):
        lived.train()
        lived.act()
        lived.check()
        if lived.wrong:
            break  # what follows follows from it
    return lived.wrong


SPACE = Space(
    "life",
    axes={
        "score": [*SCORES],
        "capacity": [None, 8, 5],
        "on_full": ["evict", "default", "grow"],
        "protected_steps": [1, 2],
        "admission": [*ADMISSION],
        "refused": ["initial", "zeros"],
        "ttl": [False, True],
        "eval_default": ["initial", "zeros"],
        "optimizer": [*OPTIMIZERS],
        "split": [False, True],
        "between": [
            *("nothing", "erase", "remove", "expire", "clear", "compact", "reserve"),
            *("materialize", "copy", "pickle", "state_dict", "save"),
        ],
    },
    constraints=[
        lambda score, capacity, on_full: score != "none" or capacity is None or on_full != "evict",
        lambda capacity, on_full: capacity is not None or on_full == "evict",
        lambda capacity, protected_steps: capacity is not None or protected_steps == 1,
        lambda between, ttl: between != "expire" or ttl,
    ],
    check=check_life,
    public=[td.Policy, SingleTableOptions],
    without_axis={
        "half_life": "half_life_steps is the same with another clock",
        "half_life_steps": "of score=decayed",
        "keep_at_least": "tests/table/test_expiry_floor.py",
        "check": "says, and changes nothing",
        "policy": "the axes above",
        **dict.fromkeys(
            (
                *("name", "initializer", "dtype", "padding_idx", "storage", "process_group"),
                *("device", "output_dtype", "trainable"),
            ),
            "of the space of modules or of saving",
        ),
        **dict.fromkeys(("max_rows", "memory_budget"), "tests/table/test_eviction.py"),
    },
)
