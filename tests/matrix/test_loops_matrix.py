"""Training loops: every idiom with every other, on a dynamic table as on nn.Embedding."""

from __future__ import annotations

import pytest
import torch
from covering import Case, RanksOf, failures
from loops_space import SCHEDULES, SPACE
from torch.optim import lr_scheduler

pytestmark = pytest.mark.cpu_only("GradScaler and autocast of the CPU")

PARTS = 40


@pytest.fixture(scope="module")
def pairs() -> list[Case]:
    return SPACE.cases(2)


@pytest.mark.parametrize("found", ["ranks=2 wrap=fsdp2 split=True clips=True"])
def test_what_was_found(ranks_of: RanksOf, found: str) -> None:
    assert failures(SPACE, [SPACE.parsed(found)], ranks_of) == []


@pytest.mark.filterwarnings("ignore::UserWarning")  # of schedulers in unusual loops
@pytest.mark.parametrize("part", range(PARTS))
def test_pairs(pairs: list[Case], ranks_of: RanksOf, part: int) -> None:
    assert failures(SPACE, pairs[part::PARTS], ranks_of) == []


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_triples(ranks_of: RanksOf) -> None:
    assert failures(SPACE, SPACE.cases(3), ranks_of) == []


def test_all_schedulers_of_torch_are_tried() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    tried = {type(make(optimizer)).__name__ for make in SCHEDULES.values()}
    assert tried >= {*lr_scheduler.__all__} - {"LRScheduler"}
