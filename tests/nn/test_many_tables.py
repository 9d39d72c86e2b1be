"""Thousands of tables and features: time grows with their number, not with its square."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain

import pytest
import torch

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("times of the CPU")

FEW, TIMES = 200, 10
MOST = 3 * TIMES  # times as long; by squares it would be 100


def least_seconds(run: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        begin = time.process_time()
        run()
        taken.append(time.process_time() - begin)
    return min(taken)


def names_of(tables: int, features: int) -> list[list[str]]:
    return [[f"{t}.{f}" for f in range(features)] for t in range(tables)]


def bags(tables: int, features: int) -> td.DynamicEmbeddingBagCollection:
    return td.DynamicEmbeddingBagCollection(
        [
            td.TableConfig(f"t{t}", 4, feature_names=names)
            for t, names in enumerate(names_of(tables, features))
        ],
        optimizer=td.SGD(lr=0.1),
    )


def test_construction() -> None:
    bags(1, 1)  # what is imported then
    few, many = (least_seconds(lambda n=n: bags(n, 1), 2) for n in (FEW, FEW * TIMES))
    assert many < MOST * few


@pytest.mark.parametrize("more", ["tables", "features"])
def test_a_step(more: str) -> None:
    seconds = []
    for number in (FEW, FEW * TIMES):
        shape = (number, 1) if more == "tables" else (2, number // 2)
        module, names = bags(*shape), list(chain(*names_of(*shape)))
        jagged = td.KeyedJagged(names, torch.arange(2 * number), torch.arange(0, 2 * number + 1, 2))

        def step(module: td.DynamicEmbeddingBagCollection, jagged: td.KeyedJagged) -> None:
            module(jagged).sum().backward()
            module.optimizer.step()

        seconds.append(least_seconds(lambda m=module, j=jagged: step(m, j), 5))
    assert seconds[1] < MOST * seconds[0]
