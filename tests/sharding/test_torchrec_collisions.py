"""Tables behind TorchRec's managed collision modules: every id takes its row along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

import torch_dynemb as td
from torch_dynemb import migrate
from torch_dynemb.table.content import read_content

pytestmark = pytest.mark.cpu_only("TorchRec's modules")

DIM, ROWS = 4, 8
POLICIES = {
    "lfu": (LFU_EvictionPolicy, ("frequency",)),
    "lru": (LRU_EvictionPolicy, ("step",)),
    "distance": (DistanceLFU_EvictionPolicy, ("frequency", "step")),
}


def features(ids: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids)).long())


def managed(policy: Any, **arguments: Any) -> ManagedCollisionEmbeddingBagCollection:
    config = EmbeddingBagConfig(
        name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"]
    )
    module = MCHManagedCollisionModule(
        zch_size=ROWS,
        device=torch.device("cpu"),
        eviction_policy=policy(),
        eviction_interval=2,
        input_hash_size=2**62,
        **arguments,
    )
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=[config]),
        ManagedCollisionCollection({"t": module}, [config]),
    )


def outputs(model: ManagedCollisionEmbeddingBagCollection, ids: list[int]) -> Tensor:
    return model(features(ids))[0].to_dict()["f"].detach()


@pytest.mark.parametrize("name", POLICIES)
def test_ids_read_what_the_managed_table_gave_them(name: str) -> None:
    policy, scores = POLICIES[name]
    old = managed(policy)
    known = [100, 7, 55, 2**50]
    for step in range(6):
        old(features([*known, 55, 2**40 + step]))
    old.eval()
    module = old._managed_collision_collection._managed_collision_modules["t"]
    weight = old._embedding_module.embedding_bags["t"]
    new = td.DynamicEmbeddingBag(
        DIM,
        mode="sum",
        optimizer=td.SGD(lr=0.1),
        policy=td.Policy(score=scores),
        eval_default="zeros",
    )
    migrate.load(new, migrate.read_torchrec_mch(module, weight))
    new.eval()
    assert torch.equal(new(torch.tensor(known)[:, None]), outputs(old, known))
    content = read_content(new.group.tables, 0)
    assert 2**63 - 1 not in content.ids.tolist()
    of_55 = int(content.scores[scores[0]][content.ids == 55])
    assert of_55 == {"frequency": 12, "step": 6}[scores[0]]
    assert new.group.steps == 6


def test_a_state_dict_is_enough_and_state_comes_along() -> None:
    old = managed(LFU_EvictionPolicy)
    for _ in range(4):
        old(features([3, 4, 5]))
    weight = old._embedding_module.embedding_bags["t"].weight
    sums = torch.arange(float(ROWS))
    source = migrate.read_torchrec_mch(
        {f"x.{name}": of for name, of in old.state_dict().items() if "managed_coll" in name},
        weight,
        state={"sum": sums},
    )
    new = td.DynamicEmbedding(DIM, optimizer=td.RowWiseAdagrad(lr=0.1))
    migrate.load(new, source)
    content = read_content(new.group.tables, 0)
    for id_, row, of_row in zip(content.ids, content.rows, content.state["sum"], strict=True):
        slot = int((weight == row).all(1).nonzero()[0])
        assert float(of_row) == float(sums[slot])
        assert int(id_) in (3, 4, 5)
    assert len(new) == 3


def test_a_table_in_which_no_id_has_a_row() -> None:
    old = managed(LFU_EvictionPolicy)
    module = old._managed_collision_collection._managed_collision_modules["t"]
    new = td.DynamicEmbedding(DIM, optimizer=td.SGD(lr=0.1))
    weight = old._embedding_module.embedding_bags["t"]
    assert migrate.load(new, migrate.read_torchrec_mch(module, weight))["embedding"].ids == 0


def test_wrong_modules_are_refused() -> None:
    old = managed(LFU_EvictionPolicy)
    module = old._managed_collision_collection._managed_collision_modules["t"]
    with pytest.raises(ValueError, match=r"has 8 ids and .* 8 rows, but weight has 5 rows"):
        migrate.read_torchrec_mch(module, torch.ones(5, DIM))
    with pytest.raises(ValueError, match="module has no tensor '_mch_sorted_raw_ids', only"):
        migrate.read_torchrec_mch({"a": torch.ones(2)}, torch.ones(5, DIM))
    with pytest.raises(TypeError, match="module is 3, expected a managed collision module"):
        migrate.read_torchrec_mch(3, torch.ones(5, DIM))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"weight is .*, expected float \[rows, dim\]"):
        migrate.read_torchrec_mch(module, torch.ones(5))
    with pytest.raises(ValueError, match=r"state\['sum'\] has shape \(3,\), expected 8 rows"):
        migrate.read_torchrec_mch(module, torch.ones(ROWS, DIM), state={"sum": torch.ones(3)})
    hashed = managed(LFU_EvictionPolicy, input_hash_func=lambda ids, size: ids % size)
    module = hashed._managed_collision_collection._managed_collision_modules["t"]
    with pytest.raises(ValueError, match="hashes ids before it looks them up"):
        migrate.read_torchrec_mch(module, torch.ones(ROWS, DIM))
    shard = {
        "_mch_sorted_raw_ids": torch.tensor([5, 2**63 - 1]),
        "_mch_remapped_ids_mapping": torch.tensor([8, 9]),
    }
    with pytest.raises(ValueError, match="has row 9, expected 0 to 1: give the whole state"):
        migrate.read_torchrec_mch(shard, torch.ones(2, DIM))


def test_hash_zch() -> None:
    identities = torch.tensor([[40], [-1], [2**50], [-7]])
    weight = torch.randn(4, DIM)
    new = td.DynamicEmbedding(
        DIM, optimizer=td.Adagrad(lr=0.1), policy=td.Policy(score="frequency")
    )

    class Tracked(torch.nn.Module):  # its kernel trains on a GPU only; these are its tensors
        _track_id_freq = True

        def __init__(self) -> None:
            super().__init__()
            self._hash_zch_identities = torch.nn.Parameter(identities, requires_grad=False)
            seen = torch.tensor([[3], [0], [4], [5]])
            self._hash_zch_runtime_meta = torch.nn.Parameter(seen, requires_grad=False)

    sums = torch.rand(4, DIM)
    source = migrate.read_torchrec_hash_zch(Tracked(), weight, state={"sum": sums})
    migrate.load(new, source)
    content = read_content(new.group.tables, 0)
    assert content.ids.tolist() == [-7, 40, 2**50]
    assert torch.equal(content.rows, weight[[3, 0, 2]])
    assert torch.equal(content.state["sum"], sums[[3, 0, 2]])
    assert content.scores["frequency"].tolist() == [5, 3, 4]
    with pytest.raises(ValueError, match="has 4 ids, but weight has 3 rows"):
        migrate.read_torchrec_hash_zch({"_hash_zch_identities": identities}, weight[:3])
