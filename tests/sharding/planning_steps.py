"""What the ranks of test_planner do: they plan together, and an error of the first reaches both."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch.distributed as dist
from planner_cases import bags, machine, nothing_reserved, sharders
from torchrec.distributed.planner.types import PlannerError

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicEmbeddingShardingPlanner,
    DynamicTableConstraints,
    TableOptions,
    collective_plan,
)


class OddError(Exception):
    """Can be pickled, but not read again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def plan(self, module: Any, sharders: Any) -> Any:
        raise self.error


class _Unpicklable:
    def plan(self, module: Any, sharders: Any) -> Any:
        return lambda: None


def plans_and_errors(rank: int) -> tuple[str, Any]:
    """The plan of both ranks, and the kind of the error where no plan fits."""
    module = bags(a=100, b=100)
    constraint = DynamicTableConstraints(TableOptions(policy=td.Policy(capacity=5000)))
    options = {"constraints": {"a": constraint}, "debug": False}
    options["storage_reservation"] = nothing_reserved()
    planner = DynamicEmbeddingShardingPlanner(None, machine(), **options)
    plan = planner.collective_plan(module, sharders(), dist.group.WORLD)

    small = DynamicEmbeddingShardingPlanner(None, machine(memory=100), **options)
    with pytest.raises(PlannerError, match="Unable to find a plan") as raised:
        small.collective_plan(module, sharders())
    kind = raised.value.error_type
    if rank == 1:
        assert "planning failed on rank 0" in str(raised.value.__cause__)

    with pytest.raises(ValueError, match="of table 3"):
        collective_plan(Failing(ValueError("of table 3")), module)
    with pytest.raises(OddError if rank == 0 else RuntimeError, match="1 and 2"):
        collective_plan(Failing(OddError(1, 2)), module)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        collective_plan(_Unpicklable(), module)
    return str(plan), kind
