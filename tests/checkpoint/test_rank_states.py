"""State dicts of tables that ranks share: saved by DCP, refused where rows would be lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_state_steps import kept_by_dcp, lost_by_callers, trained_in_a_part_of_the_world
from ranks import Ranks

pytestmark = pytest.mark.cpu_only("several processes over gloo")


@pytest.mark.parametrize("alone", [False, True], ids=["shared", "one group each"])
def test_dcp_keeps_the_rows_of_each_rank(two_ranks: Ranks, tmp_path: Path, alone: bool) -> None:
    first, second = two_ranks.run(kept_by_dcp, str(tmp_path), alone)
    assert all(len(rows) > 10 for of in (first, second) for rows in of["content"])
    assert first["content"] != second["content"]
    assert first["loaded"]
    assert second["loaded"]
    common = set(first["entries"]) & set(second["entries"])
    assert {name.rpartition(".")[2] for name in common} <= {"grad_anchor"}


def test_callers_that_write_one_rank_are_refused(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(lost_by_callers)
    for of in (first, second):
        for caller, remedy in (
            ("accelerate", "call torch_dynemb.checkpoint.save_with(accelerator) before save_state"),
            ("lightning", "enable_checkpointing=False"),
            ("transformers", "save_strategy='no'"),
            ("full", "full_state_dict=True asks for that of all ranks on the first: leave it out"),
        ):
            assert (
                "a state dict has the rows of one rank, but 2 ranks share the table" in of[caller]
            )
            assert remedy in of[caller]
        assert of["other function"] == ""
    (warning,) = first["plain"]
    assert "save it on every rank and load each rank's own" in warning
    assert second["plain"] == []


def test_groups_smaller_than_the_world_train_apart_by_request(two_ranks: Ranks) -> None:
    for error in two_ranks.run(trained_in_a_part_of_the_world):
        assert "the process group has 2 ranks, and each would train its own diverging" in error
