"""Public integers may be numpy's; what is kept of them is an int, which files and ranks compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torch_dynemb as td
from torch_dynemb.recis.embedding.options import EmbeddingOption
from torch_dynemb.recis.tables.hooks import GlobalStepFilter

pytestmark = pytest.mark.cpu_only("arguments alone")

CASES: dict[str, Callable[[Any], Any]] = {
    "embedding_dim": lambda n: td.TableConfig("t", n),
    "padding_idx": lambda n: td.TableConfig("t", 4, padding_idx=n),
    "capacity": lambda n: td.Policy(capacity=n),
    "protected_steps": lambda n: td.Policy(capacity=9, protected_steps=n),
    "ttl": lambda n: td.Policy(ttl=n, keep_at_least=n),
    "half_life": lambda n: td.Policy(score="decayed", half_life=n).half_life_ticks,
    "half_life_steps": lambda n: td.Policy(score="decayed", half_life_steps=n).half_life_ticks,
    "threshold": td.AdmitFrequent,
    "sketch": lambda n: td.AdmitFrequentSketch(n, "1MB", halve_every=n),
    "of a feature": lambda n: td.FeaturePolicy(threshold=n, ttl=n),
    "top": lambda n: td.Top(n, by="frequency"),
    "columns": lambda n: td.ByColumn(((n, td.Constant(0.0)),)),
    "max_rows, budget, seed": lambda n: (
        td.TableGroup(
            [td.TableConfig("t", 4, policy=td.Policy(capacity=5))],
            optimizer=None,
            max_rows=n * 100,
            memory_budget=n * 1_000_000,
            seed=n,
        ).config
    ),
    "recis": lambda n: vars(EmbeddingOption(n, shared_name="t", max_rows=n)),
    "recis hooks": lambda n: vars(GlobalStepFilter(n, n)),
}


@pytest.mark.parametrize("case", CASES)
def test_numpy_integers_are_kept_as_ints(case: str) -> None:
    make = CASES[case]
    assert repr(make(np.int64(4))) == repr(make(4))
    assert repr(make(np.int32(4))) == repr(make(4))
    for wrong in (np.float64(4.0), np.bool_(True), True):
        with pytest.raises(TypeError, match=r"expected (int|seconds|a number)"):
            make(wrong)


def test_calls_take_numpy_integers() -> None:
    policy = td.Policy(score="timestamp")
    table = td.DynamicEmbedding(np.int32(4), name="t", optimizer=td.SGD(lr=0.1), policy=policy)
    one = np.int64(1)
    table.group.clock.set_now(one)
    table(torch.tensor([1, 2]))
    table.prefetch(torch.tensor([1]), ahead=one)
    table.optimizer.step(now=np.int64(7))
    table(torch.tensor([2]))
    assert table.group.scores.get(np.int64(0), torch.tensor([1, 2])).scores.tolist() == [1, 7]
    assert one in table
