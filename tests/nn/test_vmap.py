"""torch.vmap over lookups: those that read give what nn.Embedding gives, others are refused."""

from __future__ import annotations

import pytest
import torch
from seeding import seeded
from torch import nn

import torch_dynemb as td
from torch_dynemb import serving

pytestmark = pytest.mark.cpu_only("live tables serve on the CPU")

SGD = td.SGD(lr=0.1)
WEIGHT = torch.randn(9, 4, generator=seeded(0))
IDS = torch.randint(0, 9, (3, 2, 5), generator=seeded(1))


@pytest.mark.parametrize("kind", ["live", "eval", "frozen"])
def test_reads_are_those_of_nn_embedding(kind: str) -> None:
    static = nn.Embedding.from_pretrained(WEIGHT)
    table = td.DynamicEmbedding.from_embedding(WEIGHT, optimizer=SGD).eval()
    bag = td.DynamicEmbeddingBag.from_embedding(WEIGHT, mode="sum", optimizer=SGD).eval()
    bags = td.DynamicEmbeddingBagCollection([td.TableConfig("t", 4)], optimizer=SGD).eval()
    bags.group.insert_or_assign("t", torch.arange(9), WEIGHT)
    if kind == "live":
        table, bag, bags = (serving.live(of, headroom=5) for of in (table, bag, bags))
    elif kind == "frozen":
        table, bag, bags = (td.freeze(of) for of in (table, bag, bags))
    for dim in range(3):
        given = torch.vmap(table, in_dims=dim)(IDS)
        assert torch.equal(given, torch.vmap(static, in_dims=dim)(IDS))
    assert torch.equal(torch.vmap(torch.vmap(table))(IDS), static(IDS))
    assert torch.equal(torch.vmap(bag)(IDS), torch.stack([static(of).sum(1) for of in IDS]))
    assert torch.equal(torch.vmap(bags)({"t": IDS}), torch.stack([bags({"t": of}) for of in IDS]))
    weights = torch.rand(IDS.shape, generator=seeded(2), requires_grad=True)
    pooled = torch.vmap(lambda ids, of: bag(ids, per_sample_weights=of))(IDS, weights)
    plain = (static(IDS) * weights[..., None]).sum(2)
    torch.testing.assert_close(pooled, plain)
    given, expected = (torch.autograd.grad(of.square().sum(), weights)[0] for of in (pooled, plain))
    torch.testing.assert_close(given, expected)


def test_training_is_refused_before_an_id_is_inserted() -> None:
    table = td.DynamicEmbedding(4, name="t", optimizer=SGD)
    with pytest.raises(RuntimeError, match=r"torch.vmap over a lookup that trains .* eval\(\)"):
        torch.vmap(table)(IDS)
    assert len(table) == 0
    with torch.no_grad():
        assert torch.equal(torch.vmap(table)(IDS), table(IDS))
    with pytest.raises(RuntimeError, match=r"torch.vmap got 0 samples, expected at least 1"):
        torch.vmap(td.DynamicEmbeddingBag(4, mode="sum", optimizer=SGD).eval())(IDS[:0])
