"""Life cycle: scores and evictions, admission, ttl, removal, and policies of features."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contents import Outputs, contents, places, statistics
from made_tensors import ids, numbers, spread, values
from torch import Tensor

import torch_dynemb as td

STEPS = 8


@td.register_admission("golden: even ids")
def even_ids(new: td.NewIds) -> Tensor:
    """Admit even ids, and all of them from the fourth step on."""
    return (new.ids % 2 == 0) | (new.step >= 4)


# 40 ids a step, 103 in all: tables of up to 89 ids look for victims among all of them
POLICIES: dict[str, td.Policy] = {
    "capacity": td.Policy(capacity=60),
    "protected": td.Policy(capacity=60, score="step", protected_steps=4),
    "capacity of many": td.Policy(capacity=92, score="step"),
    "timestamp": td.Policy(capacity=60, score="timestamp"),
    "frequency": td.Policy(capacity=60, score="frequency"),
    "frequency of many": td.Policy(capacity=92, score="frequency"),
    "custom": td.Policy(capacity=60, score="custom"),
    "timestamp, frequency": td.Policy(capacity=60, score=("timestamp", "frequency")),
    "frequency, custom, timestamp": td.Policy(
        capacity=70, score=("frequency", "custom", "timestamp")
    ),
    "custom, step": td.Policy(capacity=70, score=("custom", "step")),
    "scores alone": td.Policy(score=("step", "timestamp", "frequency", "custom")),
    "full, default": td.Policy(capacity=60, on_full="default", refused="zeros"),
    "full, grow": td.Policy(capacity=60, on_full="grow", score="frequency"),
    "ttl": td.Policy(ttl=25),
    "ttl and capacity": td.Policy(ttl=25, capacity=60, score="timestamp"),
    "admit frequent": td.Policy(admission=td.AdmitFrequent(3)),
    "admit frequent and capacity": td.Policy(
        admission=td.AdmitFrequent(2), capacity=40, score="frequency", refused="zeros"
    ),
    "admit frequent, default": td.Policy(
        admission=td.AdmitFrequent(2), capacity=30, on_full="default"
    ),
    "admit by sketch": td.Policy(admission=td.AdmitFrequentSketch(3, 2048)),
    "admit by halved sketch": td.Policy(
        admission=td.AdmitFrequentSketch(3, 256, halve_every=3), refused=td.Uniform(-1.0, 1.0)
    ),
    "admit by chance": td.Policy(admission=td.AdmitByChance(0.25)),
    "admit none": td.Policy(admission=td.AdmitNone(), refused=torch.arange(5.0)),
    "admit by hook": td.Policy(admission=td.AdmitBy("golden: even ids")),
}


def batch(step: int) -> Tensor:
    """Make the ids of a step: some come in every step, most once."""
    return ids(20, 2, below=120 + 10 * step, seed=step)


def lived(policy: td.Policy, folder: Path) -> Outputs:
    """Train a table until ids have come and gone; record evictions with their rows."""
    module = td.DynamicEmbedding(
        5, name="table", optimizer=td.Adagrad(lr=0.1), policy=policy, max_rows=2000
    )
    group = module.group
    timed = policy.ttl is not None or "timestamp" in policy.scores
    if timed:
        group.clock.set_now(1000)
    evicts = policy.capacity is not None and policy.on_full in (None, "evict")
    if evicts:
        group.evicted.record(1000, rows=True)
    if isinstance(policy.admission, td.AdmitNone):
        group.insert_or_assign(0, spread(torch.arange(10)), values(10, 5, seed=9))
    found: Outputs = {}
    outputs, removed = [], []
    for step in range(STEPS):
        of_step = batch(step)
        scores = numbers(40, 50, seed=step).reshape(20, 2) if "custom" in policy.scores else None
        output = module(of_step, scores=scores)
        output.backward(values(*output.shape, seed=step))
        module.optimizer.step(now=1000 + 10 * (step + 1) if timed else None)
        outputs.append(output.detach())
        if policy.ttl is not None and step == 5:
            module.eval()
            outputs.append(module(of_step))
            module.train()
            removed.append(group.remove(0, expired=True))
    found["outputs"] = torch.stack(outputs)
    found["read"] = module.eval()(batch(3))
    if removed:
        found["removed"] = torch.tensor(removed)
    if evicts:
        evicted = group.evicted.take().get("table")
        if evicted is not None:
            found["evicted"] = {"ids": evicted.ids, "scores": evicted.scores}
            if evicted.rows is not None:
                found["evicted rows"] = evicted.rows
    return {
        **found,
        **contents(module),
        "statistics": statistics(group),
        "places": places(group, 0),
    }


def full_with_error(folder: Path) -> Outputs:
    """Refuse a batch as a whole where it exceeds the capacity."""
    policy = td.Policy(capacity=30, on_full="error")
    module = td.DynamicEmbedding(
        5, name="table", optimizer=td.Adagrad(lr=0.1), policy=policy, max_rows=100
    )
    refused = 0
    for step in range(4):
        try:
            output = module(spread(torch.arange(9 * step, 9 * step + 8)))
        except RuntimeError:
            refused += 1
            continue
        output.backward(values(*output.shape, seed=step))
        module.optimizer.step()
    return {"refused": torch.tensor(refused), **contents(module)}


def large(folder: Path) -> Outputs:
    """Evict ids of a table, with batches for several threads and scores set by the program."""
    policy = td.Policy(capacity=4000, score=("frequency", "custom"))
    group = td.TableGroup(
        [td.TableConfig("a", 4, policy=policy), td.TableConfig("b", 4, policy=policy)],
        optimizer=td.SGD(lr=0.1),
        seed=3,
    )
    group.scores.set_batch(0, 5)
    group.scores.set_batch(1, 6)
    group.evicted.record(20_000)
    found: Outputs = {}
    for step in range(3):
        call = ids(6000, below=9000, seed=step)
        found[f"handles {step}"] = group.find_or_insert(call, torch.tensor([0, 4500, 6000]), [0, 1])
        group.scores.set(0, call[::7], call[::7] % 5)
        group.scores.set(1, call[5000::3], call[5000::3] % 7, score="custom")
        group.step()
    for name, evicted in sorted(group.evicted.take().items()):
        found[f"evicted {name}"] = {"ids": evicted.ids, "scores": evicted.scores}
    counts = numbers(300, 4, seed=4) + 1
    call = ids(300, below=9000, seed=9)
    offsets = torch.tensor([0, 150, 300])
    scores = numbers(300, 100, seed=5)
    found["counted"] = group.find_or_insert(call, offsets, [0, 1], counts=counts, scores=scores)
    return {**found, **contents(group), "statistics": statistics(group)}


def features(folder: Path) -> Outputs:
    """Train features that have a threshold, a ttl and scores of their own."""
    tables = [
        td.TableConfig(
            "ads",
            5,
            ["clicked", "shown", "listed"],
            policy=td.Policy(
                score=("timestamp", "frequency"), admission=td.AdmitFrequent(3), ttl=30
            ),
            feature_policies={
                "clicked": td.FeaturePolicy(threshold=1, ttl=60),
                "listed": td.FeaturePolicy(updates_scores=False),
            },
        ),
        td.TableConfig("users", 5, policy=td.Policy(capacity=25)),
        td.TableConfig("plain", 5),
    ]
    module = td.DynamicEmbeddingBagCollection(tables, optimizer=td.Adagrad(lr=0.1), max_rows=400)
    module.group.clock.set_now(500)
    outputs = []
    for step in range(6):
        of_step = {
            name: ids(10, 2, below=60, seed=10 * step + number)
            for number, name in enumerate(module.feature_names)
        }
        output = module(of_step)
        output.backward(values(*output.shape, seed=step))
        module.optimizer.step(now=500 + 12 * step)
        outputs.append(output.detach())
    return {
        "outputs": torch.stack(outputs),
        **contents(module),
        "statistics": statistics(module.group),
    }


def removal(folder: Path) -> Outputs:
    """Remove ids by every rule, train on, and compact."""
    policy = td.Policy(score=("frequency", "step"))
    module = td.DynamicEmbedding(
        6, name="table", optimizer=td.Adagrad(lr=0.1), policy=policy, max_rows=1000
    )
    group = module.group
    rules: list[dict[str, Any]] = [
        {"not_seen_for": 2},
        {"score_below": 2},
        {"predicate": lambda of_ids, scores: (of_ids % 3 == 0) & (scores < 4)},
        {"norm_below": 1.0},
    ]
    removed, outputs = [], []
    for step in range(STEPS):
        output = module(batch(step))
        output.backward(values(*output.shape, seed=step))
        module.optimizer.step()
        outputs.append(output.detach())
        if step % 2 == 1:
            rule = rules[step // 2]
            if "norm_below" in rule:  # norms of these rows are exact, unlike those of others
                known = torch.cat([of.ids for of in group.export(0)]).sort().values
                lengths = numbers(len(known), 3, seed=1).to(torch.float32)
                one_column = torch.zeros(len(known), 6)
                one_column[:, 2] = lengths - 1
                group.insert_or_assign(0, known, one_column)
            removed.append(group.remove(0, **rule))
            removed.append(group.erase(0, batch(step)[::6]))
        if step == 4:
            group.compact()
    since = [of.ids for of in group.export(0, since=2)]
    return {
        "outputs": torch.stack(outputs),
        "removed": torch.tensor(removed),
        "exported since": torch.cat([torch.empty(0, dtype=torch.int64), *since]).sort().values,
        **contents(module),
        "statistics": statistics(group),
        "places": places(group, 0),
    }


CASES: dict[str, Callable[[Path], Outputs]] = {
    **{f"policy {name}": partial(lived, policy) for name, policy in POLICIES.items()},
    "policy full, error": full_with_error,
    "policy large": large,
    "policy of features": features,
    "policy removal": removal,
}
