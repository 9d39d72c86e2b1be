"""Comparisons of our optimizers with static tables, and the ratios wanted."""

from __future__ import annotations

import functools

import torch
from peers.static_tables import fbgemm_step, hashed_step, reference_step, torch_step
from training.steps import Comparison, StaticPeer
from training.variants import BASE, BFLOAT16, FLOAT16, SHORT, Variant

HAND_TARGET = 1.4  # against the kernel without a hash table
ADAM_TARGET = {"uniform": 1.5, "Zipf": 1.3}  # against our row-wise Adagrad


def _noted(uniform: float, zipf: float, dim: int = 64) -> dict[tuple[int, str], float]:
    return {(dim, "uniform"): uniform, (dim, "Zipf"): zipf}


def _fbgemm(optimizer: str, noted_ms: dict[tuple[int, str], float]) -> StaticPeer:
    return StaticPeer("FBGEMM CPU TBE", optimizer, noted_ms, fbgemm_step)


def _torch(optimizer: str, noted_ms: dict[tuple[int, str], float]) -> StaticPeer:
    return StaticPeer("nn.EmbeddingBag(sparse)", optimizer, noted_ms, torch_step)


def _hand(optimizer: str, uniform: float) -> StaticPeer:
    return StaticPeer("reference kernel", optimizer, {(64, "uniform"): uniform}, reference_step)


def _hashed(
    optimizer: str, dtype: torch.dtype = torch.float32, *, split: bool = False
) -> StaticPeer:
    name = "reference hash table"
    if dtype != torch.float32:
        name += f" of {SHORT[dtype]}"
    if split:
        name += " in two passes"
    build = functools.partial(hashed_step, dtype=dtype, split=split)
    return StaticPeer(name, optimizer, {}, build, takes_ids=True)


def _both(ours: str, peer: StaticPeer, ratio: float) -> Comparison:
    """Return a comparison with one target for uniform and Zipf ids."""
    return Comparison(Variant(ours), peer, {"uniform": ratio, "Zipf": ratio})


STATIC_COMPARISONS = [
    _both(BASE, _fbgemm(BASE, _noted(4.7, 3.4) | _noted(13.3, 5.7, dim=128)), 0.9),
    Comparison(
        Variant("Adagrad"),
        _fbgemm("Adagrad", _noted(35, 22)),
        {"uniform": 0.25, "Zipf": 0.33},
    ),
    _both("Adagrad", _torch("Adagrad", _noted(48, 37)), 0.2),
    _both("SGD", _fbgemm("SGD", _noted(9.9, 6.0)), 0.5),
    _both("SGD", _torch("SGD", _noted(14, 7.8)), 0.5),
    _both("Adam", _torch("SparseAdam", _noted(84, 46)), 0.2),
]
# kernels that do the least work, without a hash table and with one: how far from the machine we are
HAND_COMPARISONS = [
    _both(BASE, _hand(BASE, 2.25), HAND_TARGET),
    Comparison(Variant(BASE), _hashed(BASE)),
    _both("SGD", _hand("SGD", 3.0), HAND_TARGET),
    Comparison(Variant("SGD"), _hashed("SGD")),
]
ADAM_COMPARISON = Comparison(Variant("Adam"), Variant(BASE), ADAM_TARGET)
# the same of low precision, rounded to nearest, and of split mode
LIMIT_COMPARISONS = [
    Comparison(Variant(BASE), _hashed(BASE)),
    Comparison(Variant(BASE, rows=BFLOAT16, stochastic=False), _hashed(BASE, BFLOAT16)),
    Comparison(Variant(BASE, rows=FLOAT16, stochastic=False), _hashed(BASE, FLOAT16)),
    Comparison(Variant(BASE, micro_batches=1), _hashed(BASE, split=True)),
]
