"""Policies of a group's tables and features in the form that kernels read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    BUCKET_WORDS,
    MAX_LOAD_PERCENT,
    NEVER_OCCURRED,
    POLICY_COLUMNS,
    SKETCH_ROWS,
    Admission,
    OnFull,
    PolicyColumn,
)
from torch_dynemb.policy.admission import (
    AdmissionRule,
    AdmitBy,
    AdmitByChance,
    AdmitFrequent,
    AdmitFrequentSketch,
    AdmitNone,
)
from torch_dynemb.policy.policy import SCORES, FeaturePolicy, Policy

# Each table keeps an equal share of the memory budget, divided by this.
RESERVED_SHARE = 16
# An index that grows gets this many times as large (core/index/bucket.h).
INDEX_STEP = 1.45
# of a new id, before its first score is added; others begin with 0
_COMBINED_INITIAL = {"max": -(1 << 63), "decayed_sum": NEVER_OCCURRED}
_ON_FULL = {name.lower(): number for name, number in OnFull.__members__.items()}


class Governed(Protocol):
    """A table with its policies."""

    @property
    def policy(self) -> Policy:
        """The policy of the table."""

    @property
    def feature_policies(self) -> Mapping[str, FeaturePolicy]:
        """Policies of features that differ from the table's, by name."""


@dataclass(frozen=True)
class PolicyLayout:
    """Tensors and numbers that the policies of a group need.

    Attributes:
        score_words: scores stored for an id, in order; empty: none. May end with ``"expiry"``.
        rows: of the tensor ``policy``, by column; empty: no table has a policy.
        of_feature: the row of each feature with a policy, by table and feature name.
        counters: by table, the number of its counter table, or None.
        counter_tables: by counter table, the table that it counts ids of.
        assign_rows: by table, the row to insert ids under without admission.
        sketch_cells: of all sketches.
        sketches: of each, its first cell, its cells, and the steps after which it is halved.
    """

    score_words: tuple[str, ...]
    rows: list[dict[PolicyColumn, int]]
    of_feature: dict[tuple[int, str], int]
    counters: list[int | None]
    counter_tables: list[int]
    assign_rows: list[int]
    sketch_cells: int
    sketches: list[tuple[int, int, int]]

    def policy_tensor(self) -> Tensor:
        """Return int64 [policies, POLICY_COLUMNS]."""
        tensor = torch.zeros(
            len(self.rows), POLICY_COLUMNS, dtype=torch.int64, device=torch.device("cpu")
        )
        for number, row in enumerate(self.rows):
            for column, value in row.items():
                tensor[number, column] = value
        return tensor

    def word(self, score: str) -> int:
        """Return the place of a score among the words.

        Raises:
            ValueError: the score is not stored.
        """
        if score not in self.score_words:
            raise ValueError(
                f"score {score!r} is not kept, only {list(self.score_words)}: create the table "
                f"with policy=Policy(score={score!r})"
            )
        return self.score_words.index(score)


def index_bytes_per_id(words: int) -> float:
    """Return the bytes of the index for each id that it has slots for."""
    line = 8 * (BUCKET_WORDS + words * BUCKET_WIDTH)
    return line / BUCKET_WIDTH * 100 / MAX_LOAD_PERCENT


def layout_of(
    tables: Sequence[Governed], row_bytes: Sequence[int], budget: int | None
) -> PolicyLayout:
    """Return the layout for tables with these bytes per row.

    Raises:
        ValueError: policies contradict the budget, or the budget is too small.
    """
    words = score_words_of(tables, budget is not None)
    counter_tables = [
        t for t, table in enumerate(tables) if isinstance(table.policy.admission, AdmitFrequent)
    ]
    counters = [
        len(tables) + counter_tables.index(t) if t in counter_tables else None
        for t in range(len(tables))
    ]
    sketches, cells = [], 0
    sketch_begin: dict[int, int] = {}
    for t, table in enumerate(tables):
        rule = table.policy.admission
        if isinstance(rule, AdmitFrequentSketch):
            sketch_begin[t] = cells
            sketches.append((cells, SKETCH_ROWS * rule.width, rule.halve_every or 0))
            cells += SKETCH_ROWS * rule.width
    rows = []
    for t, table in enumerate(tables):
        row = _table_row(table.policy, words, budget=budget is not None)
        if counters[t] is not None:
            row[PolicyColumn.COUNTER_TABLE] = counters[t] or 0
        if t in sketch_begin:
            row[PolicyColumn.SKETCH_BEGIN] = sketch_begin[t]
            rule = table.policy.admission
            assert isinstance(rule, AdmitFrequentSketch)
            row[PolicyColumn.SKETCH_WIDTH] = rule.width
        rows.append(row)
    if budget is not None:
        _share_budget(rows, row_bytes, budget - 4 * cells, len(words))
    default = {PolicyColumn.UPDATES_SCORES: 1, PolicyColumn.PROTECTED_STEPS: 1}
    rows += [dict(default) for _ in counter_tables]
    of_feature: dict[tuple[int, str], int] = {}
    for t, table in enumerate(tables):
        for name, policy in table.feature_policies.items():
            of_feature[t, name] = len(rows)
            rows.append(_feature_row(rows[t], policy))
    assign_rows = list(range(len(tables)))
    for t in range(len(tables)):
        if rows[t][PolicyColumn.ADMISSION] != Admission.ALL:
            assign_rows[t] = len(rows)
            rows.append({**rows[t], PolicyColumn.ADMISSION: Admission.ALL})
    hooks = any(isinstance(table.policy.admission, AdmitBy) for table in tables)
    needed = hooks or any({k: v for k, v in row.items() if v != 0} != default for row in rows)
    if not needed:
        rows, assign_rows = [], []
    return PolicyLayout(
        words, rows, of_feature, counters, counter_tables, assign_rows, cells, sketches
    )


def score_words_of(tables: Sequence[Governed], budget: bool) -> tuple[str, ...]:
    kept = {name for table in tables for name in table.policy.scores if name != "none"}
    expires = any(
        ttl is not None
        for table in tables
        for ttl in (table.policy.ttl, *(f.ttl for f in table.feature_policies.values()))
    )
    evicts = any(table.policy.full(budget=budget) == "evict" for table in tables)
    if not kept and not expires and not evicts:
        return ()
    others = [name for name in SCORES if name != "step" and name in kept]
    return ("step", *others, *(["expiry"] if expires else []))


def _table_row(policy: Policy, words: tuple[str, ...], *, budget: bool) -> dict[PolicyColumn, int]:
    def word(name: str) -> int:
        return words.index(name) if name in words else 0

    rule = policy.admission
    first = policy.scores[0]
    combined = None if policy.combine == "last" else policy.custom
    counts_decayed = "decayed" in policy.scores and policy.combine != "decayed_sum"
    return {
        PolicyColumn.TIMESTAMP_WORD: word("timestamp"),
        PolicyColumn.FREQUENCY_WORD: word("frequency"),
        PolicyColumn.CUSTOM_WORD: word("custom") if combined is None else 0,
        PolicyColumn.EXPIRY_WORD: word("expiry"),
        PolicyColumn.DECAYED_WORD: word("decayed") if counts_decayed else 0,
        PolicyColumn.HALF_LIFE: policy.half_life_ticks,
        PolicyColumn.COMBINED_WORD: 0 if combined is None else word(combined.score),
        PolicyColumn.COMBINED_INITIAL: _COMBINED_INITIAL.get(policy.combine or "", 0),
        PolicyColumn.EVICTION_WORD: word(first),
        PolicyColumn.UPDATES_SCORES: 1,
        PolicyColumn.TTL: int(policy.ttl or 0),
        PolicyColumn.CAPACITY: policy.capacity or 0,
        PolicyColumn.ON_FULL: _ON_FULL[policy.full(budget=budget)],
        PolicyColumn.PROTECTED_STEPS: policy.protected_steps,
        PolicyColumn.ADMISSION: _admission(rule),
        PolicyColumn.ADMISSION_HALF_LIFE: policy.admission_ticks,
        PolicyColumn.THRESHOLD: rule.threshold
        if isinstance(rule, AdmitFrequent | AdmitFrequentSketch)
        else 0,
        PolicyColumn.CHANCE: round(rule.probability * 2**32)
        if isinstance(rule, AdmitByChance)
        else 0,
    }


def _admission(rule: AdmissionRule | None) -> Admission:
    if isinstance(rule, AdmitFrequent):
        return Admission.FREQUENT
    if isinstance(rule, AdmitFrequentSketch):
        return Admission.FREQUENT_SKETCH
    if isinstance(rule, AdmitByChance):
        return Admission.BY_CHANCE
    if isinstance(rule, AdmitNone):
        return Admission.NONE
    return Admission.ALL  # also AdmitBy: its hook has run already


def _feature_row(table: dict[PolicyColumn, int], policy: FeaturePolicy) -> dict[PolicyColumn, int]:
    row = {**table, PolicyColumn.UPDATES_SCORES: int(policy.updates_scores)}
    if policy.threshold is not None:
        row[PolicyColumn.THRESHOLD] = policy.threshold
    if policy.ttl is not None:
        row[PolicyColumn.TTL] = int(policy.ttl)
    return row


def _share_budget(
    rows: list[dict[PolicyColumn, int]], row_bytes: Sequence[int], budget: int, words: int
) -> None:
    for row, bytes_of_row in zip(rows, row_bytes, strict=True):
        id_bytes = int(bytes_of_row + INDEX_STEP * index_bytes_per_id(words)) + 1
        row[PolicyColumn.BUDGET] = max(budget, 0)
        row[PolicyColumn.ID_BYTES] = id_bytes
        row[PolicyColumn.RESERVED_IDS] = max(budget, 0) // len(rows) // RESERVED_SHARE // id_bytes
    if any(row[PolicyColumn.RESERVED_IDS] < 1 for row in rows):
        least = max(row[PolicyColumn.ID_BYTES] for row in rows) * len(rows) * RESERVED_SHARE
        raise ValueError(
            f"TableGroup: memory_budget leaves {budget} bytes for {len(rows)} tables, expected at "
            f"least {least}: sketches of admission take their bytes first"
        )


__all__ = ["INDEX_STEP", "PolicyLayout", "index_bytes_per_id", "layout_of", "score_words_of"]
