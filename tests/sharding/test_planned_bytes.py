"""Bytes that ``plan --ranks --link`` predicts from a sample are those that ranks send."""

from __future__ import annotations

import planned_bytes_steps
import pytest
from planned_bytes_steps import VARIANTS, Setting
from ranks import Ranks
from scale_out import planned_case

from torch_dynemb.plan.ranks.layouts import Cluster

pytestmark = pytest.mark.cpu_only("gloo")

SETTING = Setting(tables=5, rows=2000, bag=3, dim=16, batch=512)


@pytest.mark.long
def test_bytes_of_four_ranks_on_two_nodes(four_ranks: Ranks) -> None:
    cluster = Cluster(4, 2)
    of_ranks = four_ranks.run(planned_bytes_steps.counted_bytes, tuple(SETTING), cluster)
    for number, (sharding, dedup) in enumerate(VARIANTS):
        predicted = planned_case(SETTING, cluster, sharding, dedup=dedup)["sent"]
        counted = [sent[number] for sent in of_ranks]
        name = f"{sharding}, dedup {dedup}"
        for kind in ("splits", "lengths", "ids", "rows", "gradients"):
            mean = sum(sent[kind] for sent in counted) / 4
            assert predicted[kind] == pytest.approx(mean, rel=0.02), (name, kind)
        totals = [sum(sent.values()) for sent in counted]
        assert predicted["busiest_rank"] == pytest.approx(max(totals), rel=0.02), name
