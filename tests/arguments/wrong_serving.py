"""``freeze``, live tables, and models that have no tables."""

from __future__ import annotations

from refusing import Row, raising
from torch import nn

import torch_dynemb as td
from torch_dynemb import serving

BAG = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), name="t")


ROWS: list[Row] = [
    *raising(
        ValueError,
        (lambda: serving.live(BAG, headroom=1, rows="int3"), "rows is 'int3', expected one of"),
        (lambda: serving.live(BAG, headroom=-1), "headroom is -1, expected at least 0"),
        (
            lambda: serving.live(BAG, headroom={"x": 1}),
            r"headroom has tables \['x'\], expected a number for",
        ),
        (
            lambda: td.freeze(nn.Linear(2, 2), missing=True),
            r"missing is True, but the model, a Linear, has no dyn",
        ),
        (
            lambda: td.freeze(nn.Linear(2, 2), ranks="rest"),
            r"freeze: ranks is 'rest', expected one of",
        ),
        (lambda: td.private_to_rank(nn.Linear(1, 1)), "model is a Linear without dynamic tables"),
    ),
    *raising(
        RuntimeError,
        (lambda: serving.live(BAG, headroom=2**34), r"bytes, but .* bytes of memory are free"),
    ),
    *raising(
        TypeError,
        (lambda: serving.live(nn.Linear(2, 2), headroom=1), "Linear has no dynamic tables"),
        (lambda: td.freeze(nn.Linear(2, 2), missing=1), r"freeze: missing is 1, expected"),
        (lambda: td.private_to_rank(3), "private_to_rank: modules is 3"),
    ),
]
