"""What the ranks of test_scores do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import Batch, batches_of_ranks, keyed_jagged
from sharded_models import Table, sharded
from torch import Tensor
from torchrec import KeyedJaggedTensor

import torch_dynemb as td
from torch_dynemb.compat.dynamicemb import pop_evicted_keys
from torch_dynemb.policy.half_life import counts_of
from torch_dynemb.torchrec import TableOptions, table_rows

FROM_WEIGHTS = TableOptions(policy=td.Policy(score="custom"), score_from="weights")

DECAYED = TableOptions(
    policy=td.Policy(score=td.Custom(combine="decayed_sum", half_life_steps=1)),
    score_from="weights",
)


def _scaled(batch: Batch) -> Batch:
    """Weights with different integers next to them."""
    assert batch.weights is not None
    weights = {name: [1000 * bag for bag in bags] for name, bags in batch.weights.items()}
    return replace(batch, weights=weights)


def _without_samples(batch: Batch) -> Batch:
    none: dict[str, list[Tensor]] = {name: [] for name in batch.ids}
    return Batch(none, none)


def _unweighted(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        features.keys(), features.values(), lengths=features.lengths(), stride=features.stride()
    )


def _scores(model: torch.nn.Module, table: str, steps: float = 0.0) -> dict[int, float]:
    """Return the custom scores of all ranks by id; decayed sums as of a step."""
    found: dict[int, float] = {}
    for rows in table_rows(model, table):
        scores = rows.scores.get("custom")
        if scores is None:
            scores = counts_of(rows.scores["decayed"], steps)
        found |= zip(rows.ids.tolist(), scores.tolist(), strict=True)
    return found


def weights_become_scores(rank: int, sharding: str, pooling: str, combine: Any) -> int:
    """Train with weights, and compare the scores of all ranks with those of a dict.

    Returns:
        The number of ids with a score.
    """
    tables = (
        Table("scored", 8, ("a", "b"), pooling, sharding),
        Table("plain", 8, ("c",), pooling, sharding),
    )
    half_life = {"half_life_steps": 1} if combine == "decayed_sum" else {}
    score = td.Custom(combine=combine, **half_life)
    scored = TableOptions(policy=td.Policy(score=score), score_from="weights")
    options = {"scored": scored, "plain": TableOptions()}
    model = sharded(tables, options=options, optimizer=td.SGD(lr=0.1))
    expected: dict[int, float] = {}
    for step in range(3):
        batches = batches_of_ranks("weighted", "abc", dist.get_world_size(), step, 20)
        batches = [_scaled(batch) for batch in batches]
        if step == 1:
            batches[1] = _without_samples(batches[1])
        features = keyed_jagged(batches[rank], "weighted")
        sum(out.sum() for out in model(features).values()).backward()
        model.fused_optimizer.step()
        largest: dict[int, float] = {}
        total: dict[int, float] = {}
        for batch in batches:
            assert batch.weights is not None
            for name in "ab":
                for bag, weights in zip(batch.ids[name], batch.weights[name], strict=True):
                    numbers = weights if combine == "decayed_sum" else weights.round()
                    for id_, number in zip(bag.tolist(), numbers.tolist(), strict=True):
                        largest[id_] = max(largest.get(id_, 0), number)
                        total[id_] = total.get(id_, 0) + number
        if combine == "last":
            expected |= largest
        elif combine == "max":
            expected |= {id_: max(of, expected.get(id_, 0)) for id_, of in largest.items()}
        else:
            expected |= {id_: of + expected.get(id_, 0) for id_, of in total.items()}
        if combine == "decayed_sum":  # as of the next step
            expected = {id_: of / 2 for id_, of in expected.items()}
    found = _scores(model, "scored", steps=3.0)
    assert found == (pytest.approx(expected, rel=1e-5) if half_life else expected)

    model.eval()
    with torch.no_grad():
        outputs, others = model(features), model(_unweighted(features))
    for name, out in outputs.items():
        assert torch.equal(out, others[name]), name
    return len(found)


def decayed_admission(rank: int) -> tuple[int, int]:
    """Train with admission by decayed occurrences of all ranks, and compare with a dict.

    Returns:
        The number of ids with a row, and of those with enough occurrences, but without one.
    """
    threshold = 4
    policy = td.Policy(admission=td.AdmitFrequent(threshold, half_life_steps=2))
    table = Table("ids", 8, ("a", "b"))
    options = {"ids": TableOptions(policy=policy)}
    model = sharded((table,), options=options, optimizer=td.SGD(lr=0.1))
    waiting: Counter[int] = Counter()
    total: Counter[int] = Counter()
    admitted: set[int] = set()
    for step in range(8):
        batches = batches_of_ranks("plain", "ab", dist.get_world_size(), step, 40)
        features = keyed_jagged(batches[rank], "plain")
        sum(out.sum() for out in model(features).values()).backward()
        model.fused_optimizer.step()
        seen = Counter(
            id_
            for batch in batches
            for name in "ab"
            for bag in batch.ids[name]
            for id_ in bag.tolist()
        )
        total.update(seen)
        for id_, times in seen.items():
            waiting[id_] += times * 2.0 ** (step / 2)  # type: ignore[assignment]
        admitted |= {i for i in seen if waiting[i] >= threshold * 2.0 ** (step / 2) - 1e-6}
        found = {i for rows in table_rows(model, "ids") for i in rows.ids.tolist()}
        assert found == admitted, step
    return len(admitted), sum(total[i] >= threshold for i in total.keys() - admitted)


def wrong_weights(rank: int) -> list[str]:
    """Return the messages of batches that lack scores."""
    table = Table("scored", 8, ("b",))
    model, decayed = (
        sharded((table,), options={"scored": options}, optimizer=td.SGD(lr=0.1))
        for options in (FROM_WEIGHTS, DECAYED)
    )

    def raised(weights: list[float] | None, model: torch.nn.Module = model) -> str:
        given = None if weights is None else torch.tensor(weights)
        features = KeyedJaggedTensor(
            ["a", "b"], torch.arange(4), given, lengths=torch.ones(4).int()
        )
        with pytest.raises(ValueError, match="scores by score_from='weights'") as caught:
            model(features)
        return str(caught.value)

    cases: list[list[float] | None] = [None, [1, 2, torch.nan, 4], [1, 2, 3, -torch.inf]]
    messages = [*(raised(weights) for weights in cases), raised([-1, 2, 3, -0.5], decayed)]
    # weights of other features are not checked
    features = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(4),
        torch.tensor([torch.nan, torch.inf, 1e9, -3]),
        lengths=torch.ones(4).int(),
    )
    model(features)["b"].sum().backward()
    assert _scores(model, "scored") == {2: 10**9, 3: -3}
    return messages


def evicted(rank: int) -> tuple[dict[str, Any], dict[str, Any], list[int], dict[str, Any]]:
    """Evict ids of two tables, of which one records them.

    Returns:
        Ids that this rank took, ids that all ranks took after more steps, all ids of the table that
        are left, and what is left to take.
    """
    policy = td.Policy(score="step", capacity=20)
    options = {
        "recorded": TableOptions(policy=policy, record_evicted=True),
        "forgotten": TableOptions(policy=policy),
    }
    tables = tuple(Table(name, 8, (name,)) for name in options)
    model = sharded(tables, options=options, optimizer=td.SGD(lr=0.1))

    def train(steps: range) -> None:
        for step in steps:
            ids = torch.arange(6) + 6 * step
            features = KeyedJaggedTensor(list(options), ids.repeat(2), lengths=torch.ones(12).int())
            sum(out.sum() for out in model(features).values()).backward()

    train(range(6))
    own = pop_evicted_keys(model)
    train(range(6, 12))
    with pytest.raises(ValueError, match=r"names table 'forgotten' of 'model\.bags', but tables"):
        pop_evicted_keys(model, {"model.bags": ["recorded", "forgotten"]}, dist.group.WORLD)
    together = pop_evicted_keys(model, {"model.bags": ["recorded"]}, dist.group.WORLD)
    left = torch.cat([rows.ids for rows in table_rows(model, "recorded")]).sort().values.tolist()
    return own, together, left, pop_evicted_keys(model)
