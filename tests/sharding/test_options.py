"""Every option with every other, on one rank and several: outputs and a step as of numpy."""

from __future__ import annotations

import pytest
import torch
from option_steps import Options, differences
from ranks import Ranks
from sharded_models import BAG_SHARDINGS, STATIC_VALUE, Table, sharded
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

ALL = [
    Options(sharding, pooling, weighted, padded, dedup, vbe, strided=vbe == weighted)
    for sharding in BAG_SHARDINGS
    for pooling in ("sum", "mean")
    for weighted in (False, True)
    for padded in (False, True)
    for vbe in (False, True)
    for dedup in (False, True)
    if not dedup or sharding in ("row_wise", "table_wise")
]
# each sharding divides means as one with several parts does, and copies its batch if it must
SOME = [
    options
    for options in ALL
    if options.pooling == "mean" and options.weighted == options.padded == options.vbe
]


def test_one_rank(one_rank: None) -> None:
    assert differences(0, SOME) == []


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "table_row_wise", "grid_shard"])
def test_means_of_static_tables_beside_dynamic_ones(one_rank: None, sharding: str) -> None:
    tables = [
        Table("static", 8, ("a",), "mean", sharding, dynamic=False),
        Table("dynamic", 8, ("b",), "mean", sharding),
    ]
    outputs = sharded(tables)(
        KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=torch.tensor([2, 1, 0, 2]))
    )
    torch.testing.assert_close(outputs["a"], torch.full((2, 8), STATIC_VALUE))


@pytest.mark.long
def test_all_on_one_rank(one_rank: None) -> None:
    assert differences(0, ALL) == []


@pytest.mark.long
@pytest.mark.parametrize("ranks", ["two_ranks", "three_ranks", "four_ranks"])
def test_all_on_several_ranks(request: pytest.FixtureRequest, ranks: str) -> None:
    of_ranks: Ranks = request.getfixturevalue(ranks)
    assert all(wrong == [] for wrong in of_ranks.run(differences, ALL))
