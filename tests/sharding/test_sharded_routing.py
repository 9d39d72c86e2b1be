"""Which rank has an id: evenly spread, and back from what TorchRec sends."""

from __future__ import annotations

import pytest
import torch
from exported_ids import ids_after_training, tracked_rows
from jagged_batches import EXTREMES
from ranks import Ranks
from sharded_models import BAG_SHARDINGS, FOUR_RANKS
from torch import Tensor
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


def parts_of(ids: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """What TorchRec's bucketize op sends to each part: how many ids, and quotients."""
    mixed = KeyedJaggedTensor(
        ["a"], ops.mix_ids(ids), lengths=torch.ones(len(ids), dtype=torch.int64)
    )
    sent, _ = bucketize_kjt_before_all2all(
        mixed, num_buckets=parts, block_sizes=torch.zeros(1, dtype=torch.int64)
    )
    return sent.lengths().view(parts, -1).sum(1), sent.values()


def test_strided_ids_are_spread_evenly() -> None:
    counts, _ = parts_of(torch.arange(10**6) * 8, 8)
    assert counts.max() <= 1.03 * 10**6 / 8


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_quotients_give_the_ids_back(parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=generator)
    ids = torch.cat([EXTREMES, torch.arange(-100, 100), some])
    counts, quotients = parts_of(ids, parts)
    back = [
        ops.unmix_ids(of_part.contiguous(), parts=parts, part=part)
        for part, of_part in enumerate(quotients.split(counts.tolist()))
    ]
    assert torch.equal(torch.cat(back).sort().values, ids.sort().values)
    for part, of_part in enumerate(back):
        assert {id % 2**64 % parts for id in ops.mix_ids(of_part).tolist()} <= {part}


@pytest.mark.parametrize("sharding", BAG_SHARDINGS)
def test_exported_and_tracked_ids_are_those_given(
    request: pytest.FixtureRequest, sharding: str
) -> None:
    ranks: Ranks = request.getfixturevalue("four_ranks" if sharding in FOUR_RANKS else "two_ranks")
    given = {*EXTREMES.tolist(), *range(-20, 20)}
    columns: dict[int, list[int]] = {}
    tracked: set[int] = set()
    for exported, seen in ranks.run(ids_after_training, sharding, sorted(given)):
        for first, ids in exported.items():
            columns.setdefault(first, []).extend(ids)
        assert set(seen) == {id for ids in exported.values() for id in ids}
        tracked.update(seen)
    for ids in columns.values():
        assert sorted(ids) == sorted(given), "an id is missing, or on several ranks"
    assert tracked == given


@pytest.mark.long
@pytest.mark.parametrize("dedup", [False, True])
def test_trackers_stay_when_tables_move(two_ranks: Ranks, dedup: bool) -> None:
    of_ranks = two_ranks.run(tracked_rows, dedup)
    for step in range(2):
        tracked = {id for seen, _, _ in of_ranks for id in seen[step]}
        assert tracked == {*range(step - 20, step), 7}
    for _, fit, refused in of_ranks:
        assert fit
        assert (
            "find optimizer state by row number: give DeltaTrackerConfig tracking_mode" in refused
        )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sharding", ["row_wise", "table_row_wise"])
def test_a_rank_on_its_own_has_the_ids_that_were_given(sharding: str) -> None:
    given = [*EXTREMES.tolist(), *range(-20, 20)]
    exported, seen = ids_after_training(0, sharding, given)
    assert sorted(exported[0]) == sorted(seen) == sorted(set(given))
