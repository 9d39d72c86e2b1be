"""What the ranks of test_planned_bytes do: steps with their bytes counted by the benchmark."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from scale_out import VARIANTS, Setting, case_for
from sharded.scaling import run_case

from torch_dynemb.plan.ranks.layouts import Cluster


def counted_bytes(rank: int, setting: Sequence[int], cluster: Cluster) -> list[dict[str, int]]:
    """The bytes by kind that this rank sends in a step, for each sharding type."""
    sizes = Setting(*setting)
    result: list[Any] = []
    for sharding, dedup in VARIANTS:
        case = case_for(sizes, cluster, sharding, dedup=dedup)
        sent, _ = run_case(case, cluster, 0)
        result.append(sent)
    return result
