"""Policies, rules of admission, and groups that they do not fit."""

from __future__ import annotations

from typing import Any

import torch
from refusing import Row

import torch_dynemb as td


def table_group(policy: td.Policy, **arguments: Any) -> td.TableGroup:
    table = td.TableConfig("t", 4, policy=policy)
    return td.TableGroup([table], optimizer=td.Adagrad(lr=0.1), **arguments)


ROWS: list[Row] = [
    (lambda: td.Policy(capacity=0), ValueError, "Policy: .*capacity is 0, expected at least 1"),
    (lambda: td.Policy(capacity=-5), ValueError, "Policy: .*capacity is -5, expected at least 1"),
    (lambda: td.Policy(capacity=1e6), TypeError, r"Policy: .*capacity is 1000000\.0, expected int"),
    (lambda: td.Policy(capacity=True), TypeError, "Policy: .*capacity is True, expected int"),
    (
        lambda: td.Policy(protected_steps=0),
        ValueError,
        "Policy: .*protected_steps is 0, expected at least 1",
    ),
    (lambda: td.Policy(ttl=0), ValueError, "Policy: .*ttl is 0, expected at least 1"),
    (lambda: td.Policy(score="lfu"), ValueError, "Policy: .*score is 'lfu', expected 'frequency'"),
    (
        lambda: td.Policy(score=()),
        ValueError,
        r"Policy: .*score is \(\), expected every score once",
    ),
    (lambda: td.Policy(score=("step", "step")), ValueError, "Policy: .*expected every score once"),
    (lambda: td.Policy(score=("none", "step")), ValueError, "Policy: .*'none' excludes others"),
    (
        lambda: td.Policy(on_full="drop"),
        ValueError,
        "Policy: .*on_full is 'drop', expected 'evict', 'grow'",
    ),
    (
        lambda: td.Policy(score="none", capacity=5),
        ValueError,
        "Policy: .*evicts by score, but score is 'none'",
    ),
    (
        lambda: td.Policy(score="none", on_full="evict"),
        ValueError,
        "Policy: .*needs a score to choose by",
    ),
    (
        lambda: td.Policy(admission=3),
        TypeError,
        "Policy: .*admission is 3, expected a rule such as",
    ),
    (
        lambda: td.Policy(refused="ones"),
        ValueError,
        "Policy: .*refused is 'ones', expected 'initial', 'zeros' or",
    ),
    (
        lambda: td.Policy(check="abort"),
        ValueError,
        "Policy: .*check is 'abort', expected 'ignore', 'warning'",
    ),
    (
        lambda: table_group(td.Policy(on_full="default")),
        ValueError,
        "neither a capacity nor a memory budget",
    ),
    (
        lambda: table_group(td.Policy(score="step", on_full="evict")),
        ValueError,
        "neither a capacity nor",
    ),
    (
        lambda: table_group(td.Policy(on_full="grow"), memory_budget="1GB"),
        ValueError,
        "has a memory budget, which the table may not",
    ),
    (
        lambda: table_group(td.Policy(score="none"), memory_budget="1GB"),
        ValueError,
        "has a memory budget, and a full table evicts",
    ),
    (
        lambda: table_group(td.Policy(), memory_budget=0),
        ValueError,
        "memory_budget is 0, expected at least 1 byte",
    ),
    (
        lambda: table_group(td.Policy(), memory_budget="4 apples"),
        ValueError,
        "memory_budget is '4 apples', expected a number of bytes",
    ),
    (
        lambda: table_group(td.Policy(), memory_budget=1.5),
        TypeError,
        r"memory_budget is 1\.5, expected a number of bytes",
    ),
    (
        lambda: table_group(td.Policy(), memory_budget=100),
        ValueError,
        r"memory_budget leaves 100 bytes for 1 tables, expected at least",
    ),
    (
        lambda: table_group(td.Policy(refused=torch.zeros(3))),
        ValueError,
        r"policy\.refused has shape \(3,\)",
    ),
    (lambda: td.AdmitFrequent(0), ValueError, "threshold is 0, expected at least 1"),
    (lambda: td.AdmitFrequentSketch(1 << 31, "1MB"), ValueError, "expected .* less than"),
    (lambda: td.AdmitFrequent(1.5), TypeError, r"threshold is 1\.5, expected int"),
    (lambda: td.AdmitFrequentSketch(2, 8), ValueError, "memory is 8, expected at least 16"),
    (lambda: td.AdmitFrequentSketch(2, "x"), ValueError, "memory is 'x', expected a number of"),
    (lambda: td.AdmitFrequentSketch(2, 64, 0), ValueError, "halve_every is 0, expected"),
    (lambda: td.AdmitByChance(0.0), ValueError, r"probability is 0\.0, expected more than 0"),
    (lambda: td.AdmitByChance(1.1), ValueError, r"probability is 1\.1, expected"),
    (lambda: td.FeaturePolicy(threshold=0), ValueError, "threshold is 0, expected at least 1"),
    (lambda: td.FeaturePolicy(ttl=True), TypeError, "ttl is True, expected int"),
]
