"""New rows start as TorchRec's would."""

from __future__ import annotations

import warnings

import pytest
import torch
import torchrec
from exported_ids import initial_rows
from ranks import Ranks
from torchrec.distributed.model_parallel import DistributedModelParallel

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    DynamicEmbeddingShardingPlanner,
    table_rows,
)

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_uniform_by_the_size_in_the_config(two_ranks: Ranks, sharding: str) -> None:
    elements = [x for of_rank in two_ranks.run(initial_rows, sharding) for x in of_rank]
    assert len(elements) == 100 * 8
    assert all(abs(x) <= 0.25 for x in elements)  # sqrt(1 / 16)
    assert max(elements) > 0.2
    assert min(elements) < -0.2


@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
def test_weights_of_the_unsharded_collection_are_kept_as_the_warning_says(
    one_rank: None, pooled: bool
) -> None:
    kind = torchrec.EmbeddingBagCollection if pooled else torchrec.EmbeddingCollection
    config = torchrec.EmbeddingBagConfig if pooled else torchrec.EmbeddingConfig
    tables = [config(name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"])]
    sharders = [
        DynamicEmbeddingBagCollectionSharder(tables="all", optimizer=td.SGD(lr=0.1)),
        DynamicEmbeddingCollectionSharder(tables="all", optimizer=td.SGD(lr=0.1)),
    ]
    module = kind(tables=tables)
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    plan = DynamicEmbeddingShardingPlanner().collective_plan(module, sharders)
    where = {"device": torch.device("cpu"), "plan": plan, "sharders": sharders}
    with pytest.warns(UserWarning, match=r"\['t'\] do not take the weights of the unsharded"):
        model = DistributedModelParallel(module, **where)
    model.load_state_dict(before, strict=False)
    (batch,) = table_rows(model, "t")
    (weight,) = before.values()
    assert torch.equal(batch.rows, weight[batch.ids])
    assert batch.ids.sort().values.tolist() == list(range(10))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*unsharded")
        DistributedModelParallel(kind(tables=tables, device=torch.device("meta")), **where)
