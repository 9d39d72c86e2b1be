"""Lookups: bags, single rows, collections, initial values, and what unknown ids give."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contents import Outputs, contents, places
from made_tensors import ids, numbers, spread, values
from torch import Tensor

import torch_dynemb as td

DIMS = (1, 7, 16, 33, 129)  # with and without full registers

# Truncated normal has bounds by math.erf, which is the C library's.
INITIALIZERS: dict[str, td.Initializer] = {
    "constant": td.Constant(0.3),
    "uniform": td.Uniform(-0.3, 0.7),
    "normal": td.Normal(0.1, 2.0),
    "xavier uniform": td.XavierUniform(),
    "xavier normal": td.XavierNormal(),
    "kaiming uniform": td.KaimingUniform(),
    "kaiming normal": td.KaimingNormal(),
}


def ragged(bags: int, *, below: int, seed: int) -> tuple[Tensor, Tensor]:
    """Make values and offsets (B + 1,) of bags of 0 to 6 ids."""
    lengths = numbers(bags, 7, seed=seed + 50)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return ids(int(offsets[-1]), below=below, seed=seed), offsets


def bags(mode: str, weighted: bool, dtype: torch.dtype, folder: Path) -> Outputs:
    """Train and read ragged bags of every dim, with a padding id."""
    found: Outputs = {}
    for dim in DIMS:
        module = td.DynamicEmbeddingBag(
            dim,
            mode=mode,
            name=f"dim{dim}",
            optimizer=td.Adagrad(lr=0.1),
            padding_idx=int(spread(torch.tensor(3))),
            include_last_offset=True,
            dtype=dtype,
            max_rows=300,
        )
        outputs: dict[str, Tensor] = {}
        for step in range(2):
            of_bags, offsets = ragged(40, below=60, seed=step)
            weights = values(len(of_bags), seed=step).requires_grad_() if weighted else None
            output = module(of_bags, offsets, weights)
            output.backward(values(*output.shape, seed=3 + step))
            module.optimizer.step()
            outputs[f"trained {step}"] = output.detach()
            if weights is not None and weights.grad is not None:
                outputs[f"gradient of weights {step}"] = weights.grad
        of_bags, offsets = ragged(40, below=90, seed=9)
        weights = values(len(of_bags), seed=9) if weighted else None
        outputs["read"] = module.eval()(of_bags, offsets, weights)
        found[f"dim {dim}"] = outputs
        found.update(contents(module, of=f"dim {dim}"))
    return found


def rows(dtype: torch.dtype, output_dtype: torch.dtype, folder: Path) -> Outputs:
    """Train and read single rows of every dim."""
    found: Outputs = {}
    for dim in DIMS:
        module = td.DynamicEmbedding(
            dim,
            name=f"dim{dim}",
            optimizer=td.RowWiseAdagrad(lr=0.1),
            dtype=dtype,
            output_dtype=output_dtype,
            max_rows=300,
        )
        outputs: dict[str, Tensor] = {}
        for step in range(2):
            output = module(ids(3, 2, 5, below=40, seed=step))
            output.backward(values(*output.shape, seed=step).to(output_dtype))
            module.optimizer.step()
            outputs[f"trained {step}"] = output.detach()
        outputs["read"] = module.eval()(ids(50, below=80, seed=5))
        outputs["none"] = module(torch.empty(0, dtype=torch.int64))
        found[f"dim {dim}"] = outputs
        found.update(contents(module, of=f"dim {dim}"))
    return found


def large_reads(folder: Path) -> Outputs:
    """Read batches that threads share, also of narrow types."""
    module = td.DynamicEmbeddingBag(
        16, mode="mean", name="large", optimizer=td.SGD(lr=0.1), max_rows=10_000
    )
    output = module(ids(3000, 2, below=4000, seed=1))
    output.backward(values(*output.shape, seed=1))
    module.optimizer.step()
    read = module.eval()(ids(3000, 2, below=6000, seed=2))
    narrow = module(numbers(60, 500, seed=3).to(torch.int32).reshape(30, 2))
    return {"read": read, "narrow": narrow}


def initial(initializer: td.Initializer, folder: Path) -> Outputs:
    """Read the initial values of ids."""
    found: Outputs = {}
    for dim in (5, 33):
        module = td.DynamicEmbedding(
            dim, name="table", initializer=initializer, optimizer=td.SGD(lr=0.1), max_rows=100
        )
        found[f"dim {dim}"] = module.eval()(spread(torch.arange(200)))
        unnamed = td.DynamicEmbedding(
            dim, initializer=initializer, optimizer=td.SGD(lr=0.1), max_rows=100
        )
        found[f"dim {dim} unnamed"] = unnamed.eval()(torch.arange(20))
    return found


def by_column(folder: Path) -> Outputs:
    """Read initial values that differ by column."""
    mixed = td.ByColumn(((4, td.Constant(1.0)), (5, td.Normal()), (3, td.Uniform(-1, 1))))
    module = td.DynamicEmbedding(
        12, name="mixed", initializer=mixed, optimizer=td.SGD(lr=0.1), max_rows=100
    )
    return {"read": module.eval()(spread(torch.arange(30)))}


def defaults(folder: Path) -> Outputs:
    """Read unknown ids by every kind of default."""
    given: dict[str, Any] = {
        "initial": "initial",
        "zeros": "zeros",
        "tensor": torch.arange(6.0) / 8,
        "initializer": td.Uniform(-1.0, 1.0),
    }
    found: Outputs = {}
    for name, default in given.items():
        module = td.DynamicEmbedding(
            6, name="table", eval_default=default, optimizer=td.SGD(lr=0.1), max_rows=100
        )
        output = module(torch.arange(5))
        output.backward(values(5, 6, seed=1))
        module.optimizer.step()
        found[name] = module.eval()(torch.arange(10))
    return found


def features(step: int) -> dict[str, Any]:
    """Make ragged and rectangular features of 12 samples."""
    return {
        "clicked": ragged(12, below=30, seed=step),
        "shown": ids(12, 3, below=30, seed=step + 1),
        "user": ids(12, 1, below=9, seed=step + 2),
    }


def bag_collection(mode: str, folder: Path) -> Outputs:
    """Train several tables in one call, from a dict and from a keyed jagged tensor."""
    tables = [
        td.TableConfig("ads", 8, ["clicked", "shown"], padding_idx=5),
        td.TableConfig("users", 5, ["user"], dtype=torch.bfloat16),
    ]
    module = td.DynamicEmbeddingBagCollection(
        tables, optimizer=td.Adagrad(lr=0.1), mode=mode, max_rows=300
    )
    found: Outputs = {}
    for step in range(2):
        output = module(features(step))
        output.backward(values(*output.shape, seed=step))
        module.optimizer.step()
        found[f"trained {step}"] = output.detach()
    keyed, weights = jagged(6)
    output = module(keyed)
    output.backward(values(*output.shape, seed=6))
    module.optimizer.step()
    found["keyed"] = output.detach()
    if weights.grad is not None:
        found["gradient of weights"] = weights.grad
    found["read"] = module.eval()(features(4))
    return {**found, **contents(module)}


def jagged(step: int) -> tuple[td.KeyedJagged, Tensor]:
    """Make weighted features as a keyed jagged tensor; the weights take a gradient."""
    names = ["shown", "user", "clicked"]
    parts = [ragged(12, below=30, seed=step + number) for number in range(3)]
    of_values = torch.cat([part for part, _ in parts])
    lengths = torch.cat([offsets.diff() for _, offsets in parts])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    weights = values(len(of_values), seed=step).requires_grad_()
    return td.KeyedJagged(names, of_values, offsets, weights), weights


def collection(folder: Path) -> Outputs:
    """Train single rows of several features."""
    tables = [td.TableConfig("ads", 8, ["clicked", "shown"]), td.TableConfig("users", 8, ["user"])]
    module = td.DynamicEmbeddingCollection(tables, optimizer=td.Adagrad(lr=0.1), max_rows=300)
    found: Outputs = {}
    for step in range(2):
        output = module(
            {
                "clicked": ids(4, below=30, seed=step),
                "shown": ids(2, 3, below=30, seed=step + 1),
                "user": ids(7, below=9, seed=step + 2),
            }
        )
        of_features = {name: output[name] for name in sorted(output)}
        gradients = [values(*of.shape, seed=step) for of in of_features.values()]
        torch.autograd.backward(list(of_features.values()), gradients)
        module.optimizer.step()
        found[f"trained {step}"] = {name: of.detach() for name, of in of_features.items()}
    return {**found, **contents(module)}


# -- the index -------------------------------------------------------------------------------------


def index(score: str, folder: Path) -> Outputs:
    """Insert, erase and insert again, while the index grows: handles, order, sizes."""
    tables = [
        td.TableConfig("a", 4, policy=td.Policy(score=score)),
        td.TableConfig("b", 4),
        td.TableConfig("c", 8),
    ]
    group = td.TableGroup(tables, optimizer=td.SGD(lr=0.1), max_rows=30_000, seed=3)
    found: Outputs = {}
    for step, (count, below) in enumerate(((90, 60), (3000, 4000), (9000, 9000), (3000, 20_000))):
        call = ids(count, below=below, seed=step)
        offsets = torch.tensor([0, count // 3, count // 3 + count // 10, count])
        found[f"handles {step}"] = group.find_or_insert(call, offsets, [0, 1, 2])
        erased = [group.erase(table, call[step::5]) for table in (0, 2)]
        found[f"erased {step}"] = torch.tensor(erased)
        group.step()
    found["sizes"] = torch.tensor([group.size(table) for table in range(3)])
    for table in range(3):
        found[f"table {table}"] = places(group, table)
    group.compact()
    for table in range(3):
        found[f"table {table} compact"] = places(group, table)
    return found


def table_calls(folder: Path) -> Outputs:
    """Assign, fill, reserve, read, clear: what programs do to tables between steps."""
    group = td.TableGroup(
        [td.TableConfig("a", 5, dtype=torch.float16), td.TableConfig("b", 5, padding_idx=4)],
        optimizer=td.Adagrad(lr=0.1),
        max_rows=500,
        seed=3,
    )
    group.reserve(0, 100)
    group.insert_or_assign(0, spread(torch.arange(40)), values(40, 5, seed=1))
    group.insert(0, spread(torch.arange(30, 60)))
    group.insert(1, torch.arange(20))
    group.fill(1, 0.1)
    group.insert_or_assign(1, torch.arange(15, 25), values(10, 5, seed=2))
    asked = spread(torch.arange(70))
    found: Outputs = {
        "read a": group.read(0, asked),
        "read b": group.read(1, torch.arange(30)),
        "contains": group.contains(0, asked),
        "written": torch.tensor(group.materialize()),
        **contents(group, of="filled"),
    }
    found["cleared"] = torch.tensor([group.clear(1), group.erase(0, asked[::3])])
    group.insert(0, spread(torch.arange(100, 120)))
    return {**found, **contents(group, of="cleared"), "places": places(group, 0)}


CASES: dict[str, Callable[[Path], Outputs]] = {
    **{
        f"bags {mode}{' weighted' if weighted else ''}{name}": partial(bags, mode, weighted, dtype)
        for mode in ("sum", "mean")
        for weighted in (False, True)
        for name, dtype in (("", torch.float32), (" bf16", torch.bfloat16))
    },
    "rows fp32": partial(rows, torch.float32, torch.float32),
    "rows bf16": partial(rows, torch.bfloat16, torch.bfloat16),
    "rows fp16": partial(rows, torch.float16, torch.float16),
    "rows fp32 as bf16": partial(rows, torch.float32, torch.bfloat16),
    "large reads": large_reads,
    **{f"initial {name}": partial(initial, of) for name, of in INITIALIZERS.items()},
    "initial by column": by_column,
    "defaults": defaults,
    "bag collection sum": partial(bag_collection, "sum"),
    "bag collection mean": partial(bag_collection, "mean"),
    "collection": collection,
    "index": partial(index, "none"),
    "index with scores": partial(index, "frequency"),
    "table calls": table_calls,
}
