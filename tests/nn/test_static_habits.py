"""What users of nn.Embedding try first: refused with what to use in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_dynemb as td

pytestmark = pytest.mark.any_device

SGD = td.SGD(lr=0.1)
TABLES = [td.TableConfig("a", 4)]
PARAMETER = nn.Parameter(torch.ones(1))
STATIC = nn.Embedding(3, 4)


def table(**options: Any) -> td.DynamicEmbedding:
    return td.DynamicEmbedding(4, **{"optimizer": SGD, **options})


def bag(**options: Any) -> td.DynamicEmbeddingBag:
    return td.DynamicEmbeddingBag(4, **{"optimizer": SGD, **options})


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: td.DynamicEmbedding(1000, 16), TypeError, "1000, 16 are given by.*is unknown"),  # type: ignore[misc]
    (lambda: td.DynamicEmbeddingBag(1000, 16), TypeError, "num_embeddings is unknown here"),  # type: ignore[misc]
    (lambda: td.DynamicEmbeddingBagCollection(TABLES, SGD), TypeError, "arguments by name"),  # type: ignore[misc]
    (lambda: table(num_embeddings=9), TypeError, r"unknown argument num_embeddings.*capacity=N"),
    (lambda: bag(max_norm=1.0), TypeError, "unknown argument max_norm.*clip_norm="),
    (lambda: bag(norm_type=2.0), TypeError, "unknown argument norm_type.*clip_norm="),
    (lambda: table(scale_grad_by_freq=True), TypeError, "unknown argument scale_grad_by_freq"),
    (lambda: table(sparse=True), TypeError, "unknown argument sparse: leave it out"),
    (lambda: table(_weight=PARAMETER), TypeError, "unknown argument _weight: from_embedding"),
    (lambda: table(freeze=True), TypeError, "unknown argument freeze: trainable=False"),
    (lambda: table(lr=0.1), TypeError, r"argument lr.*optimizer=torch_dynemb.Adam\(lr=...\)"),
    (lambda: bag(capacity=9), TypeError, r"unknown argument capacity.*Policy\(capacity=...\)"),
    (
        lambda: td.DynamicEmbeddingCollection(TABLES, optimizer=SGD, ttl=3),  # type: ignore[call-arg]
        TypeError,
        r"DynamicEmbeddingCollection: unknown argument ttl.*Policy\(ttl=...\)",
    ),
    (lambda: table(colour=1), TypeError, "unexpected keyword argument 'colour'$"),
    (lambda: bag(optimiser=SGD), TypeError, "'optimiser'. Did you mean 'optimizer'"),
    (lambda: table(optimizer="adagrad"), TypeError, r"'adagrad', .* torch_dynemb.Adagrad\(\)"),
    (lambda: table(optimizer="lion"), TypeError, r"'lion', .* torch_dynemb.Adam\(lr=1e-3\)"),
    (lambda: table(optimizer=td.AdamW), TypeError, r"torch_dynemb.AdamW\(\)"),
    (lambda: bag(optimizer=torch.optim.SparseAdam), TypeError, r"torch_dynemb.Adam\(\)"),
    (lambda: bag(optimizer=torch.optim.SGD([PARAMETER])), TypeError, r"torch_dynemb.SGD\(\)"),
    (lambda: table().set_optimizer(torch.optim.Adam), TypeError, r"torch_dynemb.Adam\(\)"),  # type: ignore[arg-type]
    (lambda: td.Policy(score="lru"), ValueError, "score is 'lru', expected 'step'"),  # type: ignore[arg-type]
    (lambda: td.Policy(score=("LFU", "step")), ValueError, "'LFU', expected 'frequency'"),  # type: ignore[arg-type]
    (lambda: table().weight, AttributeError, r"DynamicEmbedding has no weight.*group.read\(0, ids"),
    (lambda: bag().num_embeddings, AttributeError, r"has no num_embeddings.*len\(module\)"),
    (lambda: bag().max_norm, AttributeError, "has no max_norm"),
    (lambda: table().reset_parameters(), AttributeError, r"no reset_parameters.*clear\(0\)"),
    (lambda: td.DynamicEmbedding.from_pretrained, AttributeError, "from_embedding"),
    (lambda: table().from_pretrained, AttributeError, "no from_pretrained: from_embedding"),
    (
        lambda: table().load_state_dict(nn.Embedding(3, 4).state_dict()),
        RuntimeError,
        r"weight: the state is of a static table.*DynamicEmbedding.from_embedding",
    ),
    (lambda: td.DynamicEmbedding.from_embedding([1.0], optimizer=SGD), TypeError, "nn.Embedding"),  # type: ignore[arg-type]
    (
        lambda: td.DynamicEmbedding.from_embedding(STATIC.weight, freeze=True),  # type: ignore[call-arg]
        TypeError,
        "DynamicEmbedding.from_embedding: unknown argument freeze: trainable=False",
    ),
    (
        lambda: td.DynamicEmbeddingBag.from_embedding(STATIC.weight, None, "sum"),  # type: ignore[misc]
        TypeError,
        "'sum' are given by position, expected weight and ids alone",
    ),
    (
        lambda: td.DynamicEmbedding.from_embedding(nn.Embedding(3, 4, max_norm=1.0), optimizer=SGD),
        ValueError,
        r"with max_norm = 1.0, which .*clip_norm=\.\.\.\) .*; give the module's weight",
    ),
    (
        lambda: td.DynamicEmbeddingBag.from_embedding(
            nn.EmbeddingBag(3, 4, scale_grad_by_freq=True), optimizer=SGD
        ),
        ValueError,
        "with scale_grad_by_freq = True, which .* scale the loss",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_habits_are_refused_with_advice(number: int) -> None:
    attempt, error, message = REFUSED[number]
    with pytest.raises(error, match=message):
        attempt()


def test_attributes_of_static_tables_are_not_there() -> None:
    for module in (table(), bag(), td.DynamicEmbedding, td.DynamicEmbeddingBag):
        for name in ("weight", "num_embeddings", "from_pretrained", "reset_parameters"):
            assert not hasattr(module, name)
    with pytest.raises(AttributeError, match="has no attribute 'colour'"):
        _ = table().colour


class Weighted(td.DynamicEmbedding):
    """A table beside parameters and modules of its own, by names of nn.Embedding."""

    def __init__(self) -> None:
        super().__init__(4, optimizer=SGD)
        self.weight = PARAMETER
        self.sparse = nn.Linear(2, 2)


def test_subclasses_may_have_attributes_of_such_names() -> None:
    module = Weighted()
    assert module.weight is PARAMETER
    assert isinstance(module.sparse, nn.Linear)
    assert not hasattr(module, "max_norm")


def test_from_embedding_takes_modules() -> None:
    static = nn.Embedding(5, 4, padding_idx=2)
    module = td.DynamicEmbedding.from_embedding(static, optimizer=SGD)
    assert sorted(module.ids().tolist()) == [0, 1, 3, 4]
    ids = torch.tensor([[0, 2], [4, 1]])
    assert torch.equal(module.eval()(ids), static(ids))
    named = td.DynamicEmbedding.from_embedding(static, torch.tensor([7, 8, 9, 2, 3]), optimizer=SGD)
    assert sorted(named.ids().tolist()) == [2, 3, 7, 8, 9]
    pooled = nn.EmbeddingBag(5, 4, mode="sum", include_last_offset=True)
    twin = td.DynamicEmbeddingBag.from_embedding(pooled, optimizer=SGD).eval()
    offsets = torch.tensor([0, 1, 4])
    assert torch.equal(twin(ids.flatten(), offsets), pooled(ids.flatten(), offsets))


def test_from_embedding_takes_rows_to_the_device_that_is_given() -> None:
    weight = torch.arange(12.0, device="cpu").reshape(3, 4)
    device = torch.empty(0).device
    module = td.DynamicEmbedding.from_embedding(
        weight, torch.tensor([7, 8, 9], device="cpu"), optimizer=SGD, device=device, padding_idx=8
    )
    assert module.group.device == device
    rows = module.eval()(torch.tensor([9, 8, 7]))
    assert torch.equal(rows, torch.stack([weight[2], 0 * weight[1], weight[0]]).to(device))


def test_bags_have_the_mode_of_torch() -> None:
    assert bag().mode == nn.EmbeddingBag(2, 4).mode == "mean"
    assert td.DynamicEmbeddingBag.from_embedding(torch.ones(2, 4), optimizer=SGD).mode == "mean"


def test_every_optimizer_has_a_learning_rate() -> None:
    defaults = {
        config: config().lr  # type: ignore[call-arg]
        for config in vars(td).values()
        if isinstance(config, type) and issubclass(config, td.optim.OptimizerConfig)
    }
    assert len(defaults) == 18
    assert defaults[td.SGD] == torch.optim.SGD([PARAMETER]).defaults["lr"]
    assert defaults[td.Adagrad] == torch.optim.Adagrad([PARAMETER]).defaults["lr"]
    assert defaults[td.Adam] == torch.optim.Adam([PARAMETER]).defaults["lr"]
    assert defaults[td.RMSprop] == torch.optim.RMSprop([PARAMETER]).defaults["lr"]
    assert defaults.pop(td.Adadelta) == torch.optim.Adadelta([PARAMETER]).defaults["lr"]
    assert set(defaults.values()) == {1e-2, 1e-3}


def test_prints_say_dim_ids_and_policy() -> None:
    module = table(name="ads", policy=td.Policy(score="frequency", capacity=9))
    module(torch.arange(3)).sum().backward()
    text = "name='ads', dim=4, policy=Policy(score='frequency', capacity=9), 3 ids, optimizer=SGD("
    assert text in repr(module)
    assert "name='ads', dim=4, 3 ids" in repr(td.freeze(module))
    collection = td.DynamicEmbeddingBagCollection(
        [td.TableConfig("a", 4), td.TableConfig("b", 8, dtype=torch.bfloat16)], optimizer=SGD
    )
    assert "  name='a', dim=4, 0 ids\n  name='b', dim=8, dtype=torch.bfloat16, 0" in repr(
        collection
    )
