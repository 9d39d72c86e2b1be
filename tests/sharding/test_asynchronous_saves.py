"""Asynchronous saves of models in DistributedModelParallel, which train on meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_models import every_change, sharded_model, train
from checkpoint_steps import names_of
from held_disk import files_of, held_disk
from ranks import Ranks

from torch_dynemb import checkpoint

pytestmark = pytest.mark.cpu_only("several processes over gloo")

SHARDINGS = ("table_wise", "row_wise", "column_wise", "table_column_wise")
KINDS = every_change(SHARDINGS, SHARDINGS[:3])


def save_and_train(rank: int, path: Path) -> bool:
    """Saves twice at one step, the second time while training goes on; whether the files differ."""
    model = sharded_model(KINDS, 0, "adam")
    train(model, rank, names_of(KINDS), range(4))
    checkpoint.save(path / "stopped", model)
    with pytest.MonkeyPatch.context() as patch, held_disk(patch) as disk:
        handle = checkpoint.save(path / "training", model, asynchronous=True)
        disk.wait_until_reached()
        train(model, rank, names_of(KINDS), range(4, 7))
        assert not handle.done()
        disk.let_go()
        train(model, rank, names_of(KINDS), range(7, 9))
        handle.wait()
    return files_of(path / "stopped") != files_of(path / "training")


@pytest.mark.long
def test_what_is_saved_is_one_step(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(save_and_train, tmp_path) == [False, False]
