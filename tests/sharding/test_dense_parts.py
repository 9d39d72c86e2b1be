"""The dense part of sharded models: static tables in any sharding, layers, and names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_models import DIM, VOCABULARY, Kind
from dense_steps import sharded_layers, static_tables, two_dimensions
from ranks import Ranks
from sharded_models import STATIC_VALUE
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

SHARDINGS = ("table_wise", "row_wise", "column_wise")
KINDS = (
    *(Kind(f"static_{a}_{b}", (a, b), dynamic=False) for a in SHARDINGS for b in SHARDINGS),
    Kind("static_copied", ("data_parallel", "data_parallel"), dynamic=False),
    Kind("static_each", ("row_wise", "table_wise"), pooling="none", dynamic=False),
    Kind("dynamic", ("row_wise", "column_wise")),
)


@pytest.mark.parametrize("output_dtensor", [(False, False), (True, True), (False, True)])
def test_static_tables_load_into_other_shardings(
    two_ranks: Ranks, tmp_path: Path, output_dtensor: tuple[bool, bool]
) -> None:
    """Beside a dynamic one, which shows nothing there."""
    path = str(tmp_path / "saved")
    (saved, before, after, trained), _ = two_ranks.run(static_tables, KINDS, path, output_dtensor)
    static = {kind.name: kind.pooling for kind in KINDS if not kind.dynamic}
    names = {
        f"{'sequences.embeddings' if pooling == 'none' else 'bags.embedding_bags'}.{name}.weight"
        for name, pooling in static.items()
    }
    names |= {"over.weight", "over.bias"}
    assert saved.keys() == after.keys() == names
    for name, value in saved.items():
        assert (value != STATIC_VALUE).any()
        assert not torch.equal(value, before[name]), name
        assert torch.equal(value, after[name]), name
        # they are the tensors that training changes
        assert "copied" in name or not torch.equal(value, trained[name]), name

    # the same collection on one process
    unsharded = nn.Module()
    unsharded.bags = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                num_embeddings=VOCABULARY, embedding_dim=DIM, name=name, feature_names=[name]
            )
            for name, pooling in static.items()
            if pooling != "none"
        ]
    )
    report = td.checkpoint.load(path, unsharded, strict=False)
    assert report.unexpected == ("bags.dynamic",)
    for name, value in unsharded.state_dict().items():
        assert torch.equal(value, saved[name]), name


def test_layers_of_fsdp(two_ranks: Ranks, tmp_path: Path) -> None:
    (saved, loaded), (_, of_other) = two_ranks.run(sharded_layers, str(tmp_path / "saved"))
    assert saved.keys() == {"first.weight", "first.bias", "second.weight", "second.bias", "seen"}
    for name, value in saved.items():
        assert torch.equal(value, loaded[name])
        assert torch.equal(value, of_other[name])


def test_groups_of_ranks_with_copies_are_refused(two_ranks: Ranks) -> None:
    for raised in two_ranks.run(two_dimensions, KINDS[-1:]):
        assert raised == (
            "ValueError: EmbeddingBagCollection: env is a ShardingEnv2D, but tables ['dynamic'] "
            "are dynamic, and each group of ranks would train its own diverging copy: construct "
            "torch_dynemb.torchrec.DynamicDMPCollection, without submodule_configs for their "
            "module, or make the tables static"
        )
