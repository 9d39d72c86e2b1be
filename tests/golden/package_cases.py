"""Modules with the names of RecIS and OneEmbedding, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contents import Outputs, contents
from made_tensors import ids, numbers, spread, values
from torch import Tensor
from trained_cases import BETAS

import torch_dynemb as td
from torch_dynemb import oneembedding, recis
from torch_dynemb.recis import functional

# -- RecIS -----------------------------------------------------------------------------------------


def option(name: str = "item", **changes: Any) -> recis.EmbeddingOption:
    """Make an option with rows that differ."""
    arguments = {"embedding_dim": 4, "initializer": td.Normal(), "block_size": 8, **changes}
    return recis.EmbeddingOption(shared_name=name, **arguments)


def options() -> dict[str, recis.EmbeddingOption]:
    """Make features of all combiners, dims and dtypes."""
    tile = {"combiner": "tile", "combiner_kwargs": {"tile_len": 3}}
    admit = recis.AdmitHook("Frequency", {"threshold": 2})
    return {
        "clicked": option(combiner="mean"),
        "candidate": option(),
        "history": option(**tile),
        "user": option("user", dtype=torch.bfloat16),
        "wide": option("wide", embedding_dim=8),
        "counted": option("counted", embedding_dim=6, admit_hook=admit),
        "content": option("content", dtype=torch.int8, fp16_enabled=True),
    }


def ragged(samples: range, seed: int, *, weighted: bool = False) -> recis.RaggedTensor:
    """Make bags of 0 to 5 ids that depend on the numbers of the samples alone."""
    parts = [
        ids(int(numbers(1, 6, seed=seed + 31 * sample)), below=25, seed=seed + 17 * sample)
        for sample in samples
    ]
    of_values = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
    offsets = torch.tensor([0, *map(len, parts)]).cumsum(0)
    weights = [values(len(part), seed=seed + sample) for sample, part in enumerate(parts)]
    return recis.RaggedTensor(
        of_values, offsets, torch.cat([torch.empty(0), *weights]) if weighted else None
    )


def batch(samples: range, step: int) -> dict[str, Any]:
    """Make the features of a step."""
    users = torch.tensor([[[s % 7, -s], [s, 3]] for s in samples], dtype=torch.int64)
    return {
        "clicked": ragged(samples, 10 * step, weighted=True),
        "candidate": torch.tensor([[s % 5] for s in samples], dtype=torch.int64).reshape(-1, 1),
        "history": ragged(samples, 10 * step + 1, weighted=True),
        "user": users.reshape(-1, 2, 2),
        "wide": ragged(samples, 10 * step + 2),
        "counted": ragged(samples, 10 * step + 3),
        "content": ragged(samples, 10 * step + 4),
    }


def backward(outputs: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Give outputs that have a history their gradients; returns all outputs by name."""
    trained = [of for _, of in sorted(outputs.items()) if of.requires_grad]
    gradients = [values(*of.shape, seed=seed).to(of.dtype) for of in trained]
    torch.autograd.backward(trained, gradients)
    return {name: of.detach() for name, of in sorted(outputs.items())}


def engine(kind: type[recis.SparseAdam], folder: Path) -> Outputs:
    """Train features of an engine, save it, and load it into another."""
    module = recis.EmbeddingEngine(options())
    (content,) = (t for t in recis.filter_out_sparse_param(module).values() if t.packed)
    content.insert(spread(torch.arange(20)), values(20, 4, seed=3))
    tables = recis.filter_out_sparse_param(module)
    optimizer = kind(tables, lr=0.1, betas=BETAS, weight_decay=0.125)
    optimizer.set_grad_accum_steps(2)
    found: Outputs = {}
    for step in range(4):
        found[f"trained {step}"] = backward(module(batch(range(6), step)), step)
        optimizer.step()
        optimizer.zero_grad()
    found.update(contents(module))
    module.eval()
    asked = batch(range(3, 12), 9)
    found["read"] = {name: of.detach() for name, of in sorted(module(asked).items())}
    frozen = td.freeze(module)(asked)
    found["frozen"] = {name: of.detach() for name, of in sorted(frozen.items())}
    td.checkpoint.save(folder / "saved", module)
    twin = recis.EmbeddingEngine(options())
    kind(recis.filter_out_sparse_param(twin), lr=0.1, betas=BETAS, weight_decay=0.125)
    td.checkpoint.load(folder / "saved", twin)
    return {**found, **contents(twin, of="loaded")}


def filtered(folder: Path) -> Outputs:
    """Remove ids that were not seen for some steps."""
    hook = recis.FilterHook("GlobalStepFilter", {"filter_step": 2, "filter_interval": 3})
    module = recis.DynamicEmbedding(option(combiner="mean", filter_hook=hook))
    optimizer = recis.SparseAdam(recis.filter_out_sparse_param(module), lr=0.1, betas=BETAS)
    outputs: dict[str, Tensor] = {}
    for step in range(7):
        output = module(ragged(range(step, step + 6), step))
        output.backward(values(*output.shape, seed=step))
        optimizer.step()
        optimizer.zero_grad()
        outputs[f"{step}"] = output.detach()
    return {"outputs": outputs, **contents(module)}


def prepared(folder: Path) -> Outputs:
    """Prepare features: hashes, remainders, buckets, crosses, cutoffs."""
    of_values, offsets = ids(200, below=90, seed=1), numbers(60, 4, seed=2)
    splits = torch.cat([torch.zeros(1, dtype=torch.int64), offsets.cumsum(0)])
    text = [(numbers(int(splits[-1]), 120, seed=3)).to(torch.int8)]
    distinct, lengths, inverse = functional.ids_partition(of_values, 65536, 2)
    return {
        "farmhash": functional.farmhash(text, [splits])[0],
        "murmurhash": functional.murmurhash(text, [splits])[0],
        "mod": functional.bucketize_mod(of_values, 1000),
        "bucketize": functional.bucketize(values(200, seed=4), [-0.5, 0.0, 0.25]),
        "multi hash": torch.stack(
            list(functional.multi_hash(of_values, torch.tensor([1, 3]), [29, 47], 10))
        ),
        "partition": {"ids": distinct, "lengths": lengths, "inverse": inverse},
        "encoded": functional.ids_encode([of_values, of_values[:9]], torch.tensor([0, 5])),
    }


# -- OneEmbedding ----------------------------------------------------------------------------------


def one_embedding(folder: Path, *, dims: Any = 4, disk: bool = False) -> Any:
    """Make an embedding of three tables."""
    uniform = oneembedding.make_uniform_initializer(-0.5, 0.5)
    if disk:
        store = oneembedding.make_cached_ssd_store_options(
            cache_budget_mb=1, persistent_path=str(folder / "disk"), size_factor=3, disk="1GB"
        )
    else:
        store = oneembedding.make_device_mem_store_options(
            str(folder / "memory"), 1000, size_factor=3
        )
    return oneembedding.MultiTableMultiColumnEmbedding(
        name="small",
        embedding_dim=dims,
        dtype=torch.float32,
        key_type=torch.int64,
        tables=[oneembedding.make_table_options(uniform) for _ in range(3)],
        store_options=store,
        padding_idx=3,
    )


ONE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.5, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.1, betas=BETAS, weight_decay=0.125),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, eps=1e-3),
    "ftrl": partial(oneembedding.Ftrl, lr=0.1, lambda1=0.3, lambda2=0.1, beta=0.5),
}


def multi_table(name: str, disk: bool, folder: Path) -> Outputs:
    """Train tables by an optimizer of torch, and load a snapshot of them."""
    module = one_embedding(folder, disk=disk)
    optimizer = oneembedding.Optimizer(ONE_OPTIMIZERS[name](module.parameters()), [module])
    outputs = one_steps(module, optimizer, range(3))
    module.save_snapshot("saved")
    found: Outputs = {"trained": outputs, **contents(module)}
    one_steps(module, optimizer, range(5, 7))
    module.load_snapshot("saved")
    found.update(contents(module, of="loaded"))
    found["trained on"] = one_steps(module, optimizer, range(3, 5))
    if not disk:
        found["frozen"] = td.freeze(module)(ids(20, 3, below=60, seed=9))
    return found


def one_steps(module: Any, optimizer: Any, steps: range) -> Tensor:
    """Train steps of two lookups each; returns all outputs."""
    outputs = []
    for step in steps:
        for number, tables in enumerate((None, torch.arange(3).expand(10, 3))):
            output = module(ids(10, 3, below=40, seed=2 * step + number), tables)
            output.backward(values(*output.shape, seed=2 * step + number))
            outputs.append(output.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(outputs)


def columns(folder: Path) -> Outputs:
    """Train rows of several columns, and write them by key for other programs."""
    module = one_embedding(folder, dims=[4, 3])
    adam = torch.optim.Adam(module.parameters(), lr=0.1, betas=BETAS)
    optimizer = oneembedding.Optimizer(adam, [module])
    found: Outputs = {"trained": one_steps(module, optimizer, range(2)), **contents(module)}
    module.save_snapshot("saved")
    with oneembedding.make_persistent_table_reader(
        [str(folder / "memory")], "saved", torch.int64, torch.float32, 21
    ) as reader:
        for of_keys, of_values in reader:
            keys, rows = torch.as_tensor(of_keys), torch.as_tensor(of_values)
            order = keys.argsort()
            found[f"read {reader.table_id}"] = {"ids": keys[order], "rows": rows[order]}
    return found


CASES: dict[str, Callable[[Path], Outputs]] = {
    "recis SparseAdam": partial(engine, recis.SparseAdam),
    "recis SparseAdamWTF": partial(engine, recis.SparseAdamWTF),
    "recis filtered": filtered,
    "recis prepared": prepared,
    **{f"oneembedding {name}": partial(multi_table, name, False) for name in ONE_OPTIMIZERS},
    "oneembedding adam on a disk": partial(multi_table, "adam", True),
    "oneembedding columns": columns,
}
