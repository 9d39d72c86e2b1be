"""``freeze``, live tables, and models that have no tables."""

from __future__ import annotations

from refusing import Row
from torch import nn

import torch_dynemb as td
from torch_dynemb import serving

BAG = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), name="t")


ROWS: list[Row] = [
    (
        lambda: serving.live(BAG, headroom=1, rows="int3"),
        ValueError,
        "rows is 'int3', expected one of",
    ),
    (lambda: serving.live(BAG, headroom=-1), ValueError, "headroom is -1, expected at least 0"),
    (
        lambda: serving.live(BAG, headroom={"x": 1}),
        ValueError,
        r"headroom has tables \['x'\], expected a number for",
    ),
    (
        lambda: serving.live(BAG, headroom=2**34),
        RuntimeError,
        r"bytes, but .* bytes of memory are free",
    ),
    (lambda: serving.live(nn.Linear(2, 2), headroom=1), TypeError, "Linear has no dynamic tables"),
    (
        lambda: td.freeze(nn.Linear(2, 2), missing=True),
        ValueError,
        r"missing is True, but the model, a Linear, has no dyn",
    ),
    (lambda: td.freeze(nn.Linear(2, 2), missing=1), TypeError, r"freeze: missing is 1, expected"),
    (
        lambda: td.freeze(nn.Linear(2, 2), ranks="rest"),
        ValueError,
        r"freeze: ranks is 'rest', expected one of",
    ),
    (
        lambda: td.private_to_rank(nn.Linear(1, 1)),
        ValueError,
        "model is a Linear without dynamic tables",
    ),
    (lambda: td.private_to_rank(3), TypeError, "private_to_rank: modules is 3"),
]
