"""A rank that dies in the midst of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dying_rank import dies_in_the_second_step
from ranks import Ranks

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


@pytest.fixture
def short_lived() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def test_the_others_raise(short_lived: Ranks) -> None:
    (finished, error), (died_finished, died) = short_lived.outcomes(dies_in_the_second_step)
    assert not finished
    assert "RuntimeError" in error
    assert not died_finished
    assert died == "the process has ended"
