"""Read-only copies: frozen, quantized and live rows, and rows of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contents import Outputs, contents
from foreign_files import Rows, write_dynamicemb
from made_tensors import ids, numbers, spread, values
from torch import Tensor, nn
from trained_cases import BETAS

import torch_dynemb as td
from torch_dynemb import migrate, ops, serving
from torch_dynemb.ops.columns import RowFormat


class Model(nn.Module):
    """Bags of two dims and dtypes, bags of weighted ids, and single rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.bags = td.DynamicEmbeddingBagCollection(
            [
                td.TableConfig("a", 8, ["x", "y"], padding_idx=int(spread(torch.tensor(4)))),
                td.TableConfig("b", 6, ["z"], dtype=torch.bfloat16, eval_default="zeros"),
            ],
            optimizer=td.Adagrad(lr=0.1),
            mode="mean",
            max_rows=300,
        )
        self.bag = td.DynamicEmbeddingBag(
            20,
            mode="sum",
            name="bag",
            optimizer=td.Adagrad(lr=0.1),
            eval_default=td.Uniform(-1.0, 1.0),
            max_rows=3000,
        )
        self.rows = td.DynamicEmbedding(
            6,
            name="rows",
            optimizer=td.Adagrad(lr=0.1),
            eval_default=torch.arange(6.0) / 4,
            max_rows=300,
        )

    def forward(self, of: Tensor, bags: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pooled = self.bags({"x": of[0], "y": of[1], "z": of[2]})
        weighted = self.bag(bags, per_sample_weights=weights)
        return pooled, weighted, self.rows(of[0])


def inputs(seed: int, *, below: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make inputs of a model; the bags are so many that threads share them."""
    bags = ids(1200, 2, below=20 * below, seed=seed + 1)
    return ids(3, 30, 4, below=below, seed=seed), bags, values(1200, 2, seed=seed)


def trained() -> Model:
    """Make a model and train it."""
    model = Model()
    for step in range(2):
        outputs = model(*inputs(step, below=40))
        gradients = [values(*output.shape, seed=step) for output in outputs]
        torch.autograd.backward(list(outputs), gradients)
        for optimizer in td.table_optimizers(model):
            optimizer.step()
    return model


def named(outputs: tuple[Tensor, Tensor, Tensor]) -> Outputs:
    """Name the outputs of a model."""
    return {name: of.detach() for name, of in zip(("bags", "bag", "rows"), outputs, strict=True)}


def frozen(rows: Any, folder: Path) -> Outputs:
    """Run a frozen copy on ids of which it has some."""
    copy = td.freeze(trained(), rows=rows)
    return named(copy(*inputs(7, below=60)))


def evaluated(folder: Path) -> Outputs:
    """Run the model itself in eval mode."""
    return named(trained().eval()(*inputs(7, below=60)))


def half(folder: Path) -> Outputs:
    """Run a frozen copy of another dtype."""
    copy = td.freeze(trained()).bfloat16()
    of, bags, weights = inputs(7, below=60)
    return named(copy(of, bags, weights.bfloat16()))


def missing(folder: Path) -> Outputs:
    """Count ids that a frozen copy lacks."""
    copy: Any = td.freeze(trained(), missing=True)
    outputs, counts = copy(*inputs(7, below=60))
    return {**named(outputs), "missing": counts}


def expired(folder: Path) -> Outputs:
    """Freeze tables with ids that have expired, or wait for admission."""
    tables = [
        td.TableConfig("a", 4, policy=td.Policy(ttl=20)),
        td.TableConfig("b", 4, policy=td.Policy(admission=td.AdmitFrequent(2), refused="zeros")),
    ]
    module = td.DynamicEmbeddingBagCollection(tables, optimizer=td.Adagrad(lr=0.1), max_rows=300)
    module.group.clock.set_now(100)
    for step in range(4):
        output = module({"a": ids(8, 2, below=50, seed=step), "b": ids(8, 2, below=30, seed=step)})
        output.backward(values(*output.shape, seed=step))
        module.optimizer.step(now=110 + 10 * step)
    asked = {"a": ids(40, 2, below=60, seed=9), "b": ids(40, 2, below=60, seed=9)}
    return {"frozen": td.freeze(module)(asked), "evaluated": module.eval()(asked).detach()}


def live(rows: Any, folder: Path) -> Outputs:
    """Run a copy between updates of its rows."""
    model: Any = serving.live(trained(), headroom=400, rows=rows)
    asked = inputs(7, below=60)
    found: Outputs = {f"first {name}": of for name, of in named(model(*asked)).items()}
    for number, tables in enumerate(serving.live_tables(model).values()):
        for name in tables.sizes():
            dim = {"a": 8, "b": 6, "bag": 20, "rows": 6}[name]
            changed = spread(numbers(30, 70, seed=number).unique())
            gone = spread(torch.arange(100, 120) if name == "bag" else torch.arange(0, 40, 3))
            kept = changed[~torch.isin(changed, gone)]
            tables.update(name, kept, values(len(kept), dim, seed=number), erased=gone)
            tables.erase(name, kept[:3])
    found.update({f"second {name}": of for name, of in named(model(*asked)).items()})
    sizes = [n for tables in serving.live_tables(model).values() for n in tables.sizes().values()]
    return {**found, "sizes": torch.tensor(sizes)}


def quantized(folder: Path) -> Outputs:
    """Quantize rows of several ranges, and read them back."""
    found: Outputs = {}
    for dim in (8, 34, 130):
        scales = torch.tensor([2.0**power for power in range(-20, 20)])
        rows = values(40, dim, seed=dim) * scales[:, None]
        rows[3], rows[4] = 0.0, 7.5
        for row_format in (RowFormat.INT8, RowFormat.INT4, RowFormat.FLOAT8):
            given = rows.clamp(-60000.0, 60000.0)
            packed = ops.quantize_rows(given, row_format)
            found[f"{row_format.name.lower()} {dim}"] = {
                "packed": packed,
                "rows": ops.dequantize_rows(packed, row_format, dim),
            }
    return found


# -- rows of other libraries -----------------------------------------------------------------------


def foreign_rows(count: int, dim: int) -> Rows:
    """Make rows with the state of Adagrad and a score."""
    return Rows(
        spread(torch.arange(count)).numpy(),
        values(count, dim, seed=1).numpy(),
        {"sum": values(count, dim, seed=2).abs().numpy()},
        {"frequency": (numbers(count, 90, seed=3) + 1).numpy()},
    )


def migrated(capacity: int | None, dtype: torch.dtype, folder: Path) -> Outputs:
    """Load a dump of DynamicEmb, and train on."""
    rows = foreign_rows(70, 6)
    write_dynamicemb(folder / "model", "items", rows, ranks=2, scores=["frequency"], state=["sum"])
    module = td.DynamicEmbedding(
        6,
        name="items",
        optimizer=td.Adagrad(lr=0.1),
        policy=td.Policy(score="frequency", capacity=capacity),
        dtype=dtype,
        max_rows=200,
    )
    source = migrate.read_dynamicemb(folder / "model", "items", scores=["frequency"])
    migrate.load(module, source, batch_size=16)
    found = contents(module, of="loaded")
    output = module(ids(20, 2, below=90, seed=1))
    output.backward(values(*output.shape, seed=1))
    module.optimizer.step()
    return {**found, "output": output.detach(), **contents(module, of="trained")}


def given_tensors(folder: Path) -> Outputs:
    """Load rows that are in memory, with the steps of their optimizer, and train on."""
    rows = values(50, 6, seed=1)
    source = migrate.read_tensors(
        spread(torch.arange(50)),
        rows,
        state={"exp_avg": rows / 4, "exp_avg_sq": rows.square()},
        scores={"step": numbers(50, 9, seed=2), "frequency": numbers(50, 9, seed=3)},
        optimizer_steps=7,
    )
    module = td.DynamicEmbedding(
        6,
        name="items",
        optimizer=td.Adam(lr=0.1, betas=BETAS),
        policy=td.Policy(score=("frequency", "step")),
        max_rows=200,
    )
    module(torch.arange(30))
    migrate.load(module, source, replace=True)
    found = contents(module, of="loaded")
    output = module(ids(20, 2, below=90, seed=1))
    output.backward(values(*output.shape, seed=1))
    module.optimizer.step()
    return {**found, **contents(module, of="trained")}


CASES: dict[str, Callable[[Path], Outputs]] = {
    "evaluated": evaluated,
    "frozen": partial(frozen, None),
    **{f"frozen {rows}": partial(frozen, rows) for rows in ("int8", "int4", "fp8", "fp16", "bf16")},
    "frozen as bfloat16": half,
    "frozen with missing": missing,
    "frozen with policies": expired,
    "live": partial(live, None),
    **{f"live {rows}": partial(live, rows) for rows in ("int8", "int4", "fp8", "fp16", "bf16")},
    "quantized": quantized,
    "migrated": partial(migrated, None, torch.float32),
    "migrated with capacity": partial(migrated, 72, torch.bfloat16),
    "migrated tensors": given_tensors,
}
