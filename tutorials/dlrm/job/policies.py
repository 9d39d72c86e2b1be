"""Policies of the tables (--capacity, --eviction, --admission)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import torch_dynemb as td
from torch_dynemb.policy.policy import Score
from tutorials.dlrm.data import CATEGORY_COUNT, CriteoReader, Int64Array

COUNTED_LINES = 1 << 18
"""Lines at the beginning that are read to divide a capacity, at most."""
COUNTED_BATCH = 1 << 14

SCORES: dict[str, Score] = {"lfu": "frequency", "lru": "step", "none": "none"}
"""By the name that ``--eviction`` takes."""
_HEADROOM = 1.25  # for ids of a small feature that the first lines do not have
_LEAST_SKETCH = 16  # bytes: a cell in each of its rows


def admission_rule(spec: str, share: float = 1.0) -> td.AdmissionRule:
    """Read what ``--admission`` was given.

    Args:
        spec: ``count:N``, ``sketch:N:BYTES`` or ``chance:P``.
        share: Of the bytes of a sketch, what a table gets.

    Raises:
        ValueError: It is none of them.

    Example:
        >>> admission_rule("count:2")
        AdmitFrequent(threshold=2)
        >>> admission_rule("sketch:2:1MB", share=0.5)
        AdmitFrequentSketch(threshold=2, memory=500000, halve_every=None)
    """
    try:
        match spec.split(":"):
            case ["count", threshold]:
                return td.AdmitFrequent(int(threshold))
            case ["sketch", threshold, memory]:
                rule = td.AdmitFrequentSketch(int(threshold), memory)
                return replace(rule, memory=max(_LEAST_SKETCH, int(16 * rule.width * share)))
            case ["chance", probability]:
                return td.AdmitByChance(float(probability))
    except ValueError:
        pass
    raise ValueError(
        "expected count:N, sketch:N:BYTES or chance:P, such as count:2, sketch:2:16MB or "
        f"chance:0.1, got {spec!r}"
    )


def count_ids(reader: CriteoReader, enough: int | None) -> list[int]:
    """Count distinct ids by feature.

    Args:
        reader: Of the lines to look at.
        enough: Stop at the first batch after which there are so many altogether; None: at the end.

    Returns:
        At least 1 for every feature.
    """
    seen: list[Int64Array] = [np.empty(0, np.int64)] * CATEGORY_COUNT
    for batch in reader:
        seen = [np.union1d(known, ids) for known, ids in zip(seen, batch.ids, strict=True)]
        if enough is not None and sum(map(len, seen)) >= enough:
            break
    return [max(1, len(ids)) for ids in seen]


def divide(capacity: int, counts: Sequence[int]) -> list[int]:
    """Divide a capacity among tables: equal shares, but none larger than a table will need.

    What features of few ids leave goes to the others, in equal shares again. A proportional
    division would serve worse: the more ids a feature has, the rarer is the next one that its table
    could hold, and the less often is its row looked up.

    Args:
        capacity: At least 1 for each table.
        counts: Distinct ids by feature in the first lines; at least 1 each. A feature is taken to
            need a quarter more, or its proportional part of the capacity if that is more still.

    Returns:
        Ids by table; altogether at most ``capacity``.

    Example:
        >>> divide(100, [8, 30, 4000, 9000])
        [10, 30, 30, 30]
    """
    scale = max(_HEADROOM, capacity / sum(counts))
    left = capacity
    shares = [0] * len(counts)
    for done, table in enumerate(sorted(range(len(counts)), key=lambda t: counts[t])):
        shares[table] = min(int(counts[table] * scale), left // (len(counts) - done))
        left -= shares[table]
    return shares


def make_policies(
    *, capacity: int | None, eviction: str, admission: str | None, counts: Sequence[int]
) -> list[td.Policy]:
    """Make the policies of the tables.

    Args:
        capacity: Ids in all tables together; None: as many as come.
        eviction: The id that goes when a table is full; ``"none"``: new ids get no row then.
        admission: See :func:`admission_rule`; None: every new id is let in.
        counts: Distinct ids by feature in the first lines of the data.
    """
    capacities = [None] * len(counts) if capacity is None else divide(capacity, counts)
    return [
        td.Policy(
            score="none" if capacity is None else SCORES[eviction],
            capacity=table_capacity,
            on_full="default" if capacity is not None and eviction == "none" else None,
            admission=None if admission is None else admission_rule(admission, n / sum(counts)),
        )
        for n, table_capacity in zip(counts, capacities, strict=True)
    ]


def table_policies(
    opts: Namespace, paths: Sequence[Path], train_lines: int
) -> list[td.Policy] | None:
    """Make the policies of the tables after a look at the first lines; None: keep all ids."""
    if opts.capacity is None and opts.admission is None:
        return None
    reader = CriteoReader(
        paths,
        COUNTED_BATCH,
        stop_line=min(COUNTED_LINES, train_lines),
        on_bad_line=opts.on_bad_line,
    )
    # With twice the ids that there is room for, it shows which features have few.
    counts = count_ids(reader, None if opts.capacity is None else 2 * opts.capacity)
    return make_policies(
        capacity=opts.capacity,
        eviction=opts.eviction or "none",
        admission=opts.admission,
        counts=counts,
    )
