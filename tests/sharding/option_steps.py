"""Sharded collections of bags against numpy in float64, by option: outputs and a step of SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from seeding import seeded
from sharded_models import Table, sharded
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torch_dynemb as td
from torch_dynemb.torchrec import TableOptions, table_rows

IDS, DIM, LR = 12, 48, 0.5  # ids 0 to 11
PADDING = IDS
SAMPLES = 4
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Options:
    """A combination of options.

    Attributes:
        pooling: of the table.
        weighted: whether ids have weights.
        padded: whether the table has a padding id.
        dedup: send each distinct id once.
        vbe: a batch size per feature.
        strided: no tensor of the batch is contiguous.
        integer: dtype of ids, lengths and inverse indices.
    """

    sharding: str
    pooling: str = "mean"
    weighted: bool = False
    padded: bool = False
    dedup: bool = False
    vbe: bool = False
    strided: bool = False
    integer: str = "int64"


@dataclass(frozen=True)
class Bags:
    """The bags of a feature on a rank: ids and weights, and the bag of each sample."""

    ids: list[list[int]]
    weights: list[list[float]]
    of_samples: list[int]


def _bags(options: Options, rank: int, feature: int) -> Bags:
    random = seeded(10 * rank + feature)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=random))

    bags = SAMPLES - 1 - feature if options.vbe else SAMPLES
    ids = [[draw(IDS) for _ in range(draw(4))] for _ in range(bags)]
    ids[0] = [1, 1, PADDING] if options.padded else [1, 1, 2]  # an id twice
    weights = [[float(1 + draw(8)) if options.weighted else 1.0 for _ in bag] for bag in ids]
    of_samples = [draw(bags) if options.vbe else sample for sample in range(SAMPLES)]
    return Bags(ids, weights, of_samples)


def _strided(tensor: Tensor) -> Tensor:
    """Return the same values, each beside another value."""
    return torch.stack([tensor, torch.full_like(tensor, 3)], dim=-1)[..., 0]


def _batch(options: Options, of_features: Sequence[Bags]) -> KeyedJaggedTensor:
    integer = getattr(torch, options.integer)
    keys = ["a", "b"]
    ids = torch.tensor([id for of in of_features for bag in of.ids for id in bag], dtype=integer)
    weights = None
    if options.weighted:
        weights = torch.tensor([w for of in of_features for bag in of.weights for w in bag])
    lengths = torch.tensor([len(bag) for of in of_features for bag in of.ids], dtype=integer)
    inverse = torch.tensor([of.of_samples for of in of_features], dtype=integer)
    if options.strided:
        ids, lengths, inverse = _strided(ids), _strided(lengths), _strided(inverse)
        weights = None if weights is None else _strided(weights)
    if not options.vbe:
        return KeyedJaggedTensor(keys, ids, weights, lengths)
    return KeyedJaggedTensor(
        keys,
        ids,
        weights,
        lengths,
        stride_per_key_per_rank=[[len(of.ids)] for of in of_features],
        inverse_indices=(keys, inverse),
    )


def _pooled(options: Options, rows: Floats, bags: Bags, grads: Floats) -> tuple[Floats, Floats]:
    """Return the outputs [samples, DIM], and the gradient of the rows."""
    outputs, gradient = np.zeros((SAMPLES, DIM)), np.zeros_like(rows)
    for sample, bag in enumerate(bags.of_samples):
        counted = [
            (id, weight)
            for id, weight in zip(bags.ids[bag], bags.weights[bag], strict=True)
            if id != PADDING
        ]
        total = sum(weight for _, weight in counted) if options.pooling == "mean" else 1.0
        for id, weight in counted:
            outputs[sample] += weight / total * rows[id]
            gradient[id] += weight / total * grads[sample]
    return outputs, gradient


def differences(rank: int, of_options: Sequence[Options]) -> list[str]:
    """Return where a sharded collection, or its frozen copy, differs; empty if nowhere."""
    return [f"{options}: {wrong}" for options in of_options for wrong in _wrong(rank, options)]


def _wrong(rank: int, options: Options) -> list[str]:
    table = Table(
        "t",
        DIM,
        ("a", "b"),
        options.pooling,
        options.sharding,
        num_embeddings=IDS,
        padding_idx=PADDING if options.padded else None,
    )
    model: Any = sharded(
        [table],
        optimizer=td.SGD(lr=LR),
        options={"t": TableOptions(padding_idx=table.padding_idx)},
        weighted=options.weighted,
        use_index_dedup=options.dedup,
    )
    rows = torch.randn(IDS, DIM, generator=seeded(1))
    model.load_state_dict({"bags.embedding_bags.t.weight": rows}, strict=False)
    before = rows.numpy().astype(np.float64)
    gradient = np.zeros_like(before)
    world = dist.get_world_size()
    wrong = []
    for other in range(world):
        of_features = [_bags(options, other, feature) for feature in range(2)]
        grads = torch.randn(2, SAMPLES, DIM, generator=seeded(100 + other))
        pairs = [
            _pooled(options, before, bags, of.numpy().astype(np.float64))
            for bags, of in zip(of_features, grads, strict=True)
        ]
        gradient += sum(of for _, of in pairs) / world
        if other != rank:
            continue
        batch = _batch(options, of_features)
        outputs = model(batch)
        frozen = td.freeze(model)(batch) if rank == 0 and world == 1 else outputs
        for name, (expected, _) in zip("ab", pairs, strict=True):
            for kind, got in (("output", outputs[name]), ("frozen output", frozen[name])):
                if not np.allclose(got.detach(), expected, rtol=1e-5, atol=1e-5):
                    wrong.append(f"{kind} of {name}")
        mine, of_mine = outputs, grads
    sum((mine[name] * of).sum() for name, of in zip("ab", of_mine, strict=True)).backward()
    model.fused_optimizer.step()
    expected = before - LR * gradient
    for part in table_rows(model, "t"):
        if not np.allclose(part.rows, expected[part.ids], rtol=1e-5, atol=1e-5):
            wrong.append("rows after a step")
    return wrong
