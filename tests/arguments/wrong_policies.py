"""Policies, rules of admission, and groups that they do not fit."""

from __future__ import annotations

from typing import Any

import torch
from refusing import Row, raising

import torch_dynemb as td


def table_group(policy: td.Policy, **arguments: Any) -> td.TableGroup:
    table = td.TableConfig("t", 4, policy=policy)
    return td.TableGroup([table], optimizer=td.Adagrad(lr=0.1), **arguments)


ROWS: list[Row] = [
    *raising(
        ValueError,
        (lambda: td.Policy(capacity=-5), "Policy: .*capacity is -5, expected at least 1"),
        (lambda: td.Policy(score="lfu"), "Policy: .*score is 'lfu', expected 'frequency'"),
        (lambda: td.Policy(score=("step", "step")), "Policy: .*expected every score once"),
        (lambda: td.Policy(score=("none", "step")), "Policy: .*'none' excludes others"),
        (
            lambda: td.Policy(on_full="drop"),
            "Policy: .*on_full is 'drop', expected 'evict', 'grow'",
        ),
        (
            lambda: td.Policy(score="none", capacity=5),
            "Policy: .*evicts by score, but score is 'none'",
        ),
        (lambda: td.Policy(score="none", on_full="evict"), "Policy: .*needs a score to choose by"),
        (
            lambda: td.Policy(refused="ones"),
            "Policy: .*refused is 'ones', expected 'initial', 'zeros' or",
        ),
        (
            lambda: td.Policy(check="abort"),
            "Policy: .*check is 'abort', expected 'ignore', 'warning'",
        ),
        (
            lambda: table_group(td.Policy(on_full="default")),
            "neither a capacity nor a memory budget",
        ),
        (lambda: table_group(td.Policy(score="step", on_full="evict")), "neither a capacity nor"),
        (
            lambda: table_group(td.Policy(on_full="grow"), memory_budget="1GB"),
            "has a memory budget, which the table may not",
        ),
        (
            lambda: table_group(td.Policy(score="none"), memory_budget="1GB"),
            "has a memory budget, and a full table evicts",
        ),
        (
            lambda: table_group(td.Policy(), memory_budget=0),
            "memory_budget is 0, expected at least 1 byte",
        ),
        (
            lambda: table_group(td.Policy(), memory_budget="4 apples"),
            "memory_budget is '4 apples', expected a number of bytes",
        ),
        (
            lambda: table_group(td.Policy(), memory_budget=100),
            r"memory_budget leaves 100 bytes for 1 tables, expected at least",
        ),
        (
            lambda: table_group(td.Policy(refused=torch.zeros(3))),
            r"policy\.refused has shape \(3,\)",
        ),
        (lambda: td.AdmitFrequentSketch(1 << 31, "1MB"), "expected .* less than"),
        (lambda: td.AdmitFrequentSketch(2, 8), "memory is 8, expected at least 16"),
        (lambda: td.AdmitByChance(1.1), r"probability is 1\.1, expected"),
    ),
    *raising(
        TypeError,
        (lambda: td.Policy(capacity=1e6), r"Policy: .*capacity is 1000000\.0, expected int"),
        (lambda: td.Policy(admission=3), "Policy: .*admission is 3, expected a rule such as"),
    ),
]
