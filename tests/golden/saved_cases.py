"""Saved models: what a loaded one has, and what becomes of it in training.

Places of rows are hashed only where a load promises them, since other loads go by the order of the
files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoint_content import ColumnShards, RowPart, saved_content
from contents import Outputs, contents, places
from made_tensors import ids, spread, values
from record_dict import LEAST
from record_dict import stored as stored_in_a_dict
from torch import Tensor, nn
from trained_cases import BETAS

import torch_dynemb as td
from torch_dynemb import checkpoint, migrate


class Model(nn.Module):
    """Two groups of tables with every score, counts, a sketch and state, and a dense part.

    Args:
        other: with another capacity, and rows of another dtype.
        storage: makes the storage of a table, by its name; None: rows are in memory.
    """

    def __init__(self, *, other: bool = False, storage: Callable[[str], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        scored = td.Policy(
            score=("frequency", "timestamp", "custom"), capacity=15 if other else 26, ttl=100
        )
        self.tables = td.DynamicEmbeddingBagCollection(
            [
                td.TableConfig("scored", 4, policy=scored),
                td.TableConfig("counted", 4, policy=td.Policy(admission=td.AdmitFrequent(2))),
                td.TableConfig(
                    "sketched", 8, policy=td.Policy(admission=td.AdmitFrequentSketch(2, 64))
                ),
            ],
            optimizer=td.Adam(lr=0.1, betas=BETAS, row_steps=True),
            max_rows=300,
        )
        self.tables.group.scores.set_batch(0, 5)
        self.tables.group.clock.set_now(900)
        self.bag = td.DynamicEmbeddingBag(
            12,
            mode="sum",
            name="bag",
            optimizer=td.Adagrad(lr=0.1),
            dtype=torch.float16 if other else torch.float32,
            storage=None if storage is None else storage("bag"),
            max_rows=600 if storage is None else None,
        )
        self.dense = nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in self.dense.parameters():
                parameter.copy_(values(*parameter.shape, seed=1))

    def forward(self, features: dict[str, Tensor], others: Tensor) -> tuple[Tensor, Tensor]:
        return self.tables(features), self.bag(others)

    def train_steps(self, steps: range) -> Tensor:
        """Train steps, each of which depends on its number alone; returns all outputs."""
        outputs = []
        for step in steps:
            features = {
                name: ids(10, 2, below=60, seed=10 * step + number)
                for number, name in enumerate(("scored", "counted", "sketched"))
            }
            pair = self(features, ids(10, 6, below=900, seed=step))
            gradients = [values(*output.shape, seed=step) for output in pair]
            torch.autograd.backward(list(pair), gradients)
            self.tables.optimizer.step(now=1000 + step)
            self.bag.optimizer.step()
            with torch.no_grad():
                self.dense.weight += 0.125 * step
            outputs.append(torch.cat([output.detach() for output in pair], 1))
        self.tables.group.erase(0, spread(torch.arange(0, 60, 7)))
        return torch.stack(outputs)


def all_of(model: Model, of: str) -> Outputs:
    """Read tables and dense part."""
    dense = {name: value.clone() for name, value in model.dense.state_dict().items()}
    return {**contents(model, of=of), f"{of} dense": dense}


def trained(steps: int = 4, **arguments: Any) -> Model:
    """Make a model and train it."""
    model = Model(**arguments)
    model.train_steps(range(steps))
    return model


def state_dict(folder: Path) -> Outputs:
    """Load a state dict, and train on."""
    model, twin = trained(), trained(1)
    twin.load_state_dict(model.state_dict())
    found = all_of(twin, "loaded")
    found["loaded places"] = places(twin.tables.group, 0)
    found["trained"] = twin.train_steps(range(4, 6))
    return {**found, **all_of(twin, "later")}


def copied(folder: Path) -> Outputs:
    """Train on with a copy."""
    twin = copy.deepcopy(trained())
    return {"trained": twin.train_steps(range(4, 6)), **all_of(twin, "later")}


def exact_load(asynchronous: bool, folder: Path) -> Outputs:
    """Load a checkpoint into a model like the saved one, and train on."""
    model = trained()
    saved = checkpoint.save(folder / "saved", model, asynchronous=asynchronous)
    model.train_steps(range(7, 8))
    if asynchronous:
        saved.wait()
    twin = trained(1)
    checkpoint.load(folder / "saved", twin)
    found = all_of(twin, "loaded")
    found["loaded places"] = places(twin.tables.group, 0)
    found["trained"] = twin.train_steps(range(4, 6))
    return {**found, **all_of(twin, "later")}


def other_load(filled: bool, folder: Path) -> Outputs:
    """Load a checkpoint into tables of another capacity and dtype, and train on."""
    checkpoint.save(folder / "saved", trained())
    twin = trained(2, other=True) if filled else Model(other=True)
    checkpoint.load(folder / "saved", twin)
    found = all_of(twin, "loaded")
    found["trained"] = twin.train_steps(range(4, 6))
    return {**found, **all_of(twin, "later")}


def without_state(folder: Path) -> Outputs:
    """Load rows alone into tables of another optimizer."""
    checkpoint.save(folder / "saved", trained())
    twin = Model()
    twin.bag.set_optimizer(td.RowWiseAdagrad(lr=0.1))
    checkpoint.load(folder / "saved", twin, optimizer_state=False)
    return {**all_of(twin, "loaded"), "trained": twin.train_steps(range(4, 6))}


def read(folder: Path) -> Outputs:
    """Read a checkpoint without a model."""
    checkpoint.save(folder / "saved", trained(), state={"epoch": 3, "more": values(4, seed=2)})
    found: Outputs = {}
    for name, table in sorted(saved_content(folder / "saved").items()):
        found[f"{name} rows"] = {"ids": table.ids, "rows": table.rows}
        found[f"{name} state"] = dict(sorted(table.state.items()))
        if table.scores:
            found[f"{name} scores"] = dict(sorted(table.scores.items()))
        if table.counts:
            found[f"{name} counts"] = torch.tensor(sorted(table.counts.items()))
        if table.sketch is not None:
            found[f"{name} sketch"] = table.sketch
    with checkpoint.open(folder / "saved") as saved:
        found["dense"] = dict(sorted(saved.dense().items()))
        found["state"] = saved.state["more"]
    return found


def other_ranks(parts: int, folder: Path) -> Outputs:
    """Load a checkpoint of one rank into each of several ones."""
    model = trained()
    checkpoint.save(folder / "saved", RowPart(model.tables, 0, 1))
    found: Outputs = {}
    for rank in range(parts):
        part = RowPart(Model().tables, rank, parts)
        checkpoint.load(folder / "saved", part)
        found.update(contents(part, of=f"rank {rank}"))
    return found


def resharded(folder: Path) -> Outputs:
    """Write a checkpoint for other ranks; one rank loads its files."""
    checkpoint.save(folder / "saved", trained())
    checkpoint.reshard(folder / "saved", folder / "three", parts=3, columns=2)
    checkpoint.reshard(folder / "three", folder / "two", parts=2)
    twin = trained(1)
    checkpoint.load(folder / "two", twin)
    return {**all_of(twin, "loaded"), "trained": twin.train_steps(range(4, 6))}


def other_columns(folder: Path) -> Outputs:
    """Load column shards into shards that are cut elsewhere, and into a whole table."""
    model = ColumnShards([4, 8], td.RowWiseAdagrad(lr=0.125))
    for shard in model.shards:
        output = shard(spread(torch.arange(40)))
        output.backward(values(*output.shape, seed=output.shape[1]))
        shard.optimizer.step()
    checkpoint.save(folder / "saved", model)
    found: Outputs = {}
    for name, dims in (("other", [8, 4]), ("whole", [12])):
        twin = ColumnShards(dims, td.RowWiseAdagrad(lr=0.125))
        checkpoint.load(folder / "saved", twin)
        found.update(contents(twin, of=name))
    return found


def increments(folder: Path) -> Outputs:
    """Merge a checkpoint and its increments, load the result, and train on."""
    model = trained(3)
    checkpoint.record_changes(model)
    checkpoint.save(folder / "0", model)
    for number in (1, 2, 3):
        model.train_steps(range(2 + number, 3 + number))
        if number == 2:
            model.bag.group.remove(0, predicate=lambda of_ids, scores: of_ids % 5 == 0)
            model.bag.group.compact()
        if number == 3:
            given = spread(torch.arange(5, 30))
            model.bag.group.insert_or_assign(0, given, values(25, 12, seed=8))
        checkpoint.save(folder / f"{number}", model, since=folder / f"{number - 1}")
    found: Outputs = {}
    with checkpoint.open(folder / "2") as saved:
        table = saved.tables["bag"]
        changed = torch.cat([torch.empty(0, dtype=torch.int64), *table.id_batches(50)])
        removed = torch.cat([torch.empty(0, dtype=torch.int64), *table.removed_batches(50)])
        found["increment"] = {"ids": changed.sort().values, "removed": removed.sort().values}
    checkpoint.merge([folder / f"{number}" for number in range(4)], folder / "merged", parts=2)
    twin = trained(1)
    checkpoint.load(folder / "merged", twin)
    found.update(all_of(twin, "loaded"))
    found["trained"] = twin.train_steps(range(6, 8))
    return {**found, **all_of(twin, "later")}


def exported(folder: Path) -> Outputs:
    """Write files for other programs, and load them as a program of another library would."""
    checkpoint.save(folder / "saved", trained())
    checkpoint.export(folder / "saved", folder / "npz", file_format="npz")
    found: Outputs = {}
    for name, dim, policy in (
        ("tables.scored", 4, td.Policy(score=("frequency", "timestamp", "custom"))),
        ("bag", 12, td.Policy()),
    ):
        twin = td.DynamicEmbedding(
            dim, name="twin", optimizer=td.SGD(lr=0.1), policy=policy, max_rows=300
        )
        if policy.score is not None:
            twin.group.scores.set_batch(0, 1)
        migrate.load(twin, migrate.read_npz(folder / "npz" / name))
        found.update(contents(twin, of=name))
    return found


def static(folder: Path) -> Outputs:
    """Make a static table of a dynamic one, and back."""
    module = trained().bag
    weight, of_rows = module.to_embedding()
    order = of_rows.argsort()
    twin = td.DynamicEmbeddingBag.from_embedding(
        weight, of_rows, name="bag", optimizer=td.Adagrad(lr=0.1)
    )
    return {
        "static": {"ids": of_rows[order], "rows": weight.weight.detach()[order]},
        **contents(twin),
    }


# -- rows on disks ---------------------------------------------------------------------------------


def stored(folder: Path) -> Outputs:
    """Train rows on a disk through a small cache, and go back to a snapshot."""
    store = partial(td.SSDStore, cache=LEAST, segment="64KiB", io="threads")
    model = Model(storage=lambda name: store(folder / name))
    found: Outputs = {"trained": model.train_steps(range(4))}
    checkpoint.save_snapshot(model, "first", state={"epoch": 1})
    found.update(all_of(model, "saved"))
    found["trained on"] = model.train_steps(range(4, 6))
    checkpoint.save_snapshot(model, "second", keep_last=2)
    found.update(all_of(model, "later"))
    checkpoint.load_snapshot(model, "first")
    found.update(all_of(model, "loaded"))
    found["trained again"] = model.train_steps(range(8, 10))
    checkpoint.load_snapshot(model, "second")
    return {**found, **all_of(model, "second")}


def stored_outside(folder: Path) -> Outputs:
    """Train rows in a store of the program, and load a checkpoint into them."""
    model = Model(storage=lambda name: stored_in_a_dict())
    found: Outputs = {"trained": model.train_steps(range(4)), **all_of(model, "first")}
    checkpoint.save(folder / "saved", trained(2))
    checkpoint.load(folder / "saved", model)
    found["trained on"] = model.train_steps(range(4, 6))
    return {**found, **all_of(model, "later")}


def stored_and_saved(folder: Path) -> Outputs:
    """Load a checkpoint of rows on a disk into memory, and the other way round."""
    store = partial(td.SSDStore, cache=LEAST, segment="64KiB", io="threads")
    model = Model(storage=lambda name: store(folder / name))
    model.train_steps(range(4))
    checkpoint.save(folder / "saved", model)
    twin = trained(1)
    checkpoint.load(folder / "saved", twin)
    found = all_of(twin, "in memory")
    twin.train_steps(range(4, 5))
    checkpoint.save(folder / "again", twin)
    checkpoint.load(folder / "again", model)
    found.update(all_of(model, "on a disk"))
    found["trained"] = model.train_steps(range(5, 7))
    return found


CASES: dict[str, Callable[[Path], Outputs]] = {
    "saved state dict": state_dict,
    "saved copy": copied,
    "saved exactly": partial(exact_load, False),
    "saved in the background": partial(exact_load, True),
    "saved to others": partial(other_load, False),
    "saved to filled others": partial(other_load, True),
    "saved without state": without_state,
    "saved and read": read,
    "saved for 2 ranks": partial(other_ranks, 2),
    "saved for 3 ranks": partial(other_ranks, 3),
    "saved and resharded": resharded,
    "saved columns": other_columns,
    "saved increments": increments,
    "saved and exported": exported,
    "saved static": static,
    "stored": stored,
    "stored outside": stored_outside,
    "stored and saved": stored_and_saved,
}
