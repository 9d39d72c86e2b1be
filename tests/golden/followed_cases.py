"""Delta logs: what models have that follow one, commit by commit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from contents import Outputs, contents
from made_tensors import ids, spread, values
from torch import Tensor, nn
from trained_cases import BETAS

import torch_dynemb as td
from torch_dynemb import checkpoint, delta_log, serving


class Model(nn.Module):
    """Tables of two groups, one of which is full soon, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        policy = td.Policy(capacity=30, score=("custom", "step"))
        configs = [
            td.TableConfig("a", 4, policy=policy),
            td.TableConfig("b", 4, initializer=td.Uniform(-1.0, 1.0)),
        ]
        self.bags = td.DynamicEmbeddingBagCollection(
            configs, optimizer=td.Adam(lr=0.1, betas=BETAS), max_rows=300
        )
        self.bags.group.scores.set_batch(0, 3)
        self.one = td.DynamicEmbedding(
            8, name="one", optimizer=td.Adagrad(lr=0.1), dtype=torch.bfloat16, max_rows=300
        )
        self.dense = nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in self.dense.parameters():
                parameter.copy_(values(*parameter.shape, seed=1))

    def forward(self, a: Tensor, b: Tensor, one: Tensor) -> tuple[Tensor, Tensor]:
        return self.bags({"a": a, "b": b}), self.one(one)

    def train_step(self, step: int) -> None:
        """Train a step that depends on its number alone."""
        pair = self(
            ids(6, 3, below=60, seed=3 * step),
            ids(6, 2, below=60, seed=3 * step + 1),
            ids(6, below=40, seed=3 * step + 2),
        )
        gradients = [values(*output.shape, seed=step) for output in pair]
        torch.autograd.backward(list(pair), gradients)
        self.bags.optimizer.step()
        self.one.optimizer.step()
        with torch.no_grad():
            self.dense.weight += 0.125 * step

    def act(self, step: int) -> None:
        """Change tables otherwise than by training."""
        group, one = self.bags.group, self.one.group
        if step == 1:
            group.erase(0, spread(torch.arange(0, 20, 3)))
            one.insert_or_assign(0, spread(torch.arange(10, 25)), values(15, 8, seed=9))
        if step == 2:
            group.remove(1, predicate=lambda of_ids, scores: of_ids % 3 == 0)
            group.compact()
        if step == 3:
            one.clear(0)
            group.scores.set(0, spread(torch.arange(20)), torch.arange(20))
            group.insert(1, spread(torch.arange(60, 70)))


def dense(model: nn.Module) -> dict[str, Tensor]:
    """Copy the dense part."""
    named = model.named_parameters()
    return {name: value.detach().clone() for name, value in named if name.startswith("dense")}


def publish(model: Model, folder: Path, *, state: bool) -> None:
    """Write a base and four commits, and train on after each."""
    for step in range(3):
        model.train_step(step)
    log = delta_log.DeltaLog(folder / "log", optimizer_state=state)
    log.attach(model)
    for step in range(4):
        model.act(step)
        model.train_step(2 * step + 3)
        log.publish()
        model.train_step(2 * step + 4)
    log.close()


def training_follower(folder: Path) -> Outputs:
    """Apply commits to a model that trains on afterwards."""
    publish(Model(), folder, state=True)
    twin = Model()
    checkpoint.load(folder / "log" / "base", twin)
    follower = delta_log.follow(folder / "log", twin)
    found: Outputs = {}
    for sequence in range(1, 5):
        follower.update(until=sequence)
        found.update(contents(twin, of=f"commit {sequence}"))
        found[f"commit {sequence} dense"] = dense(twin)
    twin.train_step(20)
    return {**found, **contents(twin, of="trained")}


def replayed(state: bool, folder: Path) -> Outputs:
    """Replay a log into models, up to a commit and to its end."""
    publish(Model(), folder, state=state)
    found: Outputs = {}
    for name, until in (("second", 2), ("last", None)):
        twin = Model()
        delta_log.replay(folder / "log", twin, until=until)
        found.update(contents(twin, of=name))
        found[f"{name} dense"] = dense(twin)
    return found


def other_dtype(folder: Path) -> Outputs:
    """Apply commits to rows of another dtype."""
    publish(Model(), folder, state=True)
    twin = Model()
    twin.one = td.DynamicEmbedding(8, name="one", optimizer=td.Adagrad(lr=0.1), max_rows=300)
    delta_log.replay(folder / "log", twin)
    return contents(twin)


def commits(folder: Path) -> Outputs:
    """Hand commits to an object of the program."""
    model = Model()
    publish(model, folder, state=True)
    found: Outputs = {}

    class Target:
        """Keeps what it is given."""

        def check(self, commit: delta_log.Commit) -> None:
            pass

        def apply(self, commit: delta_log.Commit) -> None:
            number = len([name for name in found if name.endswith("dense")]) + 1
            for name, table in sorted(commit.tables.items()):
                batch = table.changed.picked(table.changed.ids.argsort())
                found[f"{number} {name}"] = {
                    "ids": batch.ids,
                    "rows": batch.rows,
                    "removed": table.removed.sort().values,
                    **dict(sorted(batch.state.items())),
                }
            found[f"{number} dense"] = dict(sorted(commit.dense.items()))

    follower = delta_log.follow(folder / "log", Target(), base=folder / "log" / "base")
    follower.update()
    return found


def serving_follower(rows: str | None, folder: Path) -> Outputs:
    """Apply commits to tables that serve."""
    model = Model()
    for step in range(2):
        model.train_step(step)
    log = delta_log.DeltaLog(folder / "log")
    log.attach(model)
    served = serving.live(model, headroom=200, rows=rows)
    follower = delta_log.follow(folder / "log", served)
    asked = [ids(30, 2, below=70, seed=1), ids(30, 2, below=70, seed=2), ids(30, below=45, seed=3)]
    found: Outputs = {}
    for step in range(4):
        model.act(step)
        model.train_step(step + 2)
        log.publish()
        log.flush()  # a thread writes
        follower.update()
        bags, one = served(*asked)
        found[f"commit {step + 1}"] = {"bags": bags, "one": one, **dense(served)}
    log.close()
    return found


CASES: dict[str, Callable[[Path], Outputs]] = {
    "followed by training": training_follower,
    "followed from the base": partial(replayed, True),
    "followed without state": partial(replayed, False),
    "followed by another dtype": other_dtype,
    "followed by a program": commits,
    "followed by live rows": partial(serving_follower, None),
    "followed by int8 rows": partial(serving_follower, "int8"),
}
