"""The model of ranks: bytes against single messages, imbalance against simulated routing."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from generated_streams import zipf

from torch_dynemb import ops
from torch_dynemb.distributed.owners import part_of
from torch_dynemb.plan.counting import IdCounter
from torch_dynemb.plan.growth import distinct_ids
from torch_dynemb.plan.ranks.demand import ColumnDemand, column_demand
from torch_dynemb.plan.ranks.fullest import fullest
from torch_dynemb.plan.ranks.layouts import (
    DEDUPED,
    SHARDINGS,
    Cluster,
    PlacedColumns,
    Sharding,
    column_shards,
    least_columns,
    placed,
)
from torch_dynemb.plan.ranks.links import Exchange, Links
from torch_dynemb.plan.ranks.op_costs import OpCosts
from torch_dynemb.plan.ranks.options import RankWishes
from torch_dynemb.plan.ranks.outcome import case_of, modelled, modelled_step
from torch_dynemb.plan.ranks.traffic import traffic_of
from torch_dynemb.plan.sizes import PlannedRow, in_memory

pytestmark = pytest.mark.cpu_only("arithmetic on the host")

ROW = PlannedRow(8, "sgd", "float32", "float32")
COSTS = OpCosts(1000.0, *[1.0] * 7, source="a test")
VARIANTS: list[tuple[Sharding, bool]] = [(sharding, False) for sharding in SHARDINGS]
VARIANTS += [(sharding, True) for sharding in DEDUPED]


def column(ids: Any, bag: int = 1, total: float = 1000.0) -> ColumnDemand:
    """A column with bags of a size, of which these are the ids."""
    ids = torch.as_tensor(ids)
    counter = IdCounter()
    counter.add(ids, torch.arange(len(ids)) // bag, lines=len(ids) // bag)
    return column_demand(counter.counts(), total)


def wishes(ranks: Sequence[int], batch: int, **more: Any) -> RankWishes:
    settings: dict[str, Any] = {
        "node_size": 8,
        "links": Links(1e9, 2e9, 1e-5),
        "cores": None,
        "min_columns": 4,
        "costs": COSTS,
        "per_second": False,
    }
    return RankWishes(list(ranks), batch, **settings | more)


# -- places ------------------------------------------------------------------------------------


def test_places_of_tables() -> None:
    cluster, loads = Cluster(8, 4), [1.0, 5.0, 3.0]
    assert placed("row_wise", loads, 8, cluster, least=4) == [
        PlacedColumns(table, 8, range(8)) for table in range(3)
    ]
    assert placed("table_wise", loads, 8, cluster, least=4) == [
        PlacedColumns(0, 8, range(2, 3)),
        PlacedColumns(1, 8, range(1)),
        PlacedColumns(2, 8, range(1, 2)),
    ]
    columns = placed("column_wise", loads, 8, cluster, least=4)
    assert [(piece.table, piece.width) for piece in columns] == [(t // 2, 4) for t in range(6)]
    assert len({piece.ranks for piece in columns}) == 6  # eight ranks, six pieces
    by_node = placed("table_row_wise", loads, 8, cluster, least=4)
    assert [piece.ranks for piece in by_node] == [range(4, 8), range(4), range(4, 8)]
    in_nodes = placed("table_column_wise", loads, 8, cluster, least=4)
    homes = [{piece.ranks.start // 4 for piece in in_nodes if piece.table == t} for t in range(3)]
    assert homes == [{1}, {0}, {1}]
    grid = placed("grid_shard", loads, 8, cluster, least=4)
    assert [(piece.width, piece.ranks) for piece in grid] == [(4, range(4)), (4, range(4, 8))] * 3


@pytest.mark.parametrize(
    ("dim", "least", "most", "shards"),
    [(64, 32, 8, 2), (64, 16, 8, 4), (64, 16, 3, 2), (96, 30, 8, 3), (7, 4, 8, 1), (1, 1, 8, 1)],
)
def test_column_shards(dim: int, least: int, most: int, shards: int) -> None:
    assert column_shards(dim, least, most) == shards


def test_the_least_columns_of_a_shard() -> None:
    assert [least_columns(dim) for dim in (1, 7, 64, 256, 1024)] == [1, 3, 32, 128, 128]


# -- bytes -------------------------------------------------------------------------------------


def messages(
    sharding: Sharding,
    pieces: Sequence[PlacedColumns],
    bags: Sequence[int],
    cluster: Cluster,
    own: int,
) -> Counter[tuple[str, int, int]]:
    """Bytes by kind, sender and receiver, without dedup, of columns with as many ids for each owner
    as for any other."""
    sent: Counter[tuple[str, int, int]] = Counter()
    everywhere = range(cluster.ranks)
    for sender in everywhere:
        for receiver in everywhere:
            sent["splits", sender, receiver] += 5 * 8
    for piece in pieces:
        for sender in everywhere:
            for owner in piece.ranks:
                sent["lengths", sender, owner] += own * 4
                sent["ids", sender, owner] += own * bags[piece.table] * 8 // len(piece.ranks)
        line = piece.width * 4
        if len(piece.ranks) == 1:
            for receiver in everywhere:
                sent["rows", piece.ranks[0], receiver] += own * line
                sent["gradients", receiver, piece.ranks[0]] += own * line
            continue
        size = len(piece.ranks)
        for receiver in everywhere:
            # sums of its lines are made by the rank of the piece with the same place in its node
            adds = piece.ranks[receiver % size]
            for owner in piece.ranks:
                sent["rows", owner, adds] += own * line
                sent["gradients", adds, owner] += own * line
            sent["rows", adds, receiver] += own * line
            sent["gradients", receiver, adds] += own * line
    return Counter({key: count for key, count in sent.items() if key[1] != key[2]})


def moved(exchanges: Sequence[Exchange], kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [exchange for exchange in exchanges if exchange.kind == kind]
    return sum(part.sent for part in parts), sum(part.received for part in parts)  # type: ignore


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_bytes_are_those_of_single_messages(sharding: Sharding, ranks: int) -> None:
    cluster, own, bags = Cluster(ranks, 4), 16, [1, 3, 2]
    # no id is frequent, so owners have equal shares
    columns = [column(np.arange(600 * bag) // 2, bag) for bag in bags]
    pieces = placed(sharding, [float(bag) for bag in bags], 8, cluster, least=4)
    step = traffic_of(pieces, columns, cluster, batch=own * ranks, row_bytes=36, dedup=False)
    expected = messages(sharding, pieces, bags, cluster, own)
    for kind in ("splits", "lengths", "ids", "rows", "gradients"):
        sent, received = moved(step.exchanges, kind)
        for rank in range(ranks):
            for column_of, far in ((0, False), (1, True)):

                def total(place: int, rank: int = rank, kind: str = kind, far: bool = far) -> int:
                    return sum(
                        count
                        for key, count in expected.items()
                        if key[0] == kind
                        and key[place] == rank
                        and (key[1] // 4 != key[2] // 4) == far
                    )

                assert float(sent[rank, column_of]) == pytest.approx(total(1)), (kind, rank)
                assert float(received[rank, column_of]) == pytest.approx(total(2)), (kind, rank)
    assert [exchange.messages for exchange in step.exchanges][:3] == [ranks - 1] * 3


@pytest.mark.parametrize("sharding", DEDUPED)
def test_bytes_of_distinct_ids(sharding: Sharding) -> None:
    cluster, own = Cluster(4, 4), 50
    columns = [column(np.arange(400) % 200), column(np.zeros(400, np.int64))]
    pieces = placed(sharding, [1.0, 1.0], 8, cluster, least=4)
    step = traffic_of(pieces, columns, cluster, batch=4 * own, row_bytes=36, dedup=True)
    # of 200 ids that occur twice in 400 lines, 50 lines have this many; and one of the other column
    distinct = 200 * (1 - (1 - 50 / 400) ** 2) + 1
    assert float(step.ids.sum()) == pytest.approx(4 * distinct, rel=1e-6)
    others = 0.75 * 4 * distinct  # the owner is another rank
    for kind, width in (("ids", 8), ("rows", 8 * 4), ("gradients", 8 * 4)):
        sent, received = moved(step.exchanges, kind)
        assert float(sent.sum()) == pytest.approx(others * width, rel=1e-6)
        assert float(received.sum()) == pytest.approx(others * width, rel=1e-6)
    lengths = sum(len(piece.ranks) for piece in pieces)
    assert float(moved(step.exchanges, "lengths")[0].sum()) == 3 * 8 * lengths


def test_one_rank_sends_nothing() -> None:
    case = case_of([column(np.arange(100))], ROW, wishes([1], 64), 1, "row_wise", dedup=False)
    assert case["sent"]["total"] == case["received"]["busiest_rank"] == 0
    assert case["seconds"]["links"] == 0


def test_an_exchange_ends_with_its_slowest_link() -> None:
    sent = torch.tensor([[4e6, 1e6], [0.0, 0.0]], dtype=torch.float64)
    exchange = Exchange("rows", sent, sent.flip(0), messages=3)
    assert exchange.seconds(Links(1e9, 2e9, 1e-3)) == pytest.approx(3e-3 + 4e6 / 2e9)
    assert exchange.seconds(Links(1e8, 2e9, 0.0)) == pytest.approx(1e6 / 1e8)


# -- imbalance ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "balls"), [(2, 1000), (8, 100), (64, 5000), (1024, 20_000)])
def test_balls_in_bins(ranks: int, balls: int) -> None:
    random = np.random.default_rng(ranks)
    shares = np.full(ranks, 1 / ranks)
    drawn = random.multinomial(balls, shares, size=500).max(1).mean()
    means = torch.full((ranks,), balls / ranks, dtype=torch.float64)
    assert fullest(means, means * (1 - 1 / ranks)) == pytest.approx(drawn, rel=0.01)


def test_a_fullest_rank_among_unequal_ones() -> None:
    random = np.random.default_rng(0)
    shares = np.array([10.0, *[9.5] * 20, *[1.0] * 100])
    shares /= shares.sum()
    drawn = random.multinomial(4000, shares, size=3000).max(1).mean()
    means = torch.from_numpy(4000 * shares)
    assert fullest(means, means * (1 - means / 4000)) == pytest.approx(drawn, rel=0.01)
    assert fullest(torch.tensor([3.0, 5.0]), torch.zeros(2)) == 5.0
    assert fullest(torch.zeros(4).double(), torch.zeros(4).double()) == 0.0


def test_distinct_ids_of_lines() -> None:
    ids, fresh = zipf(50_000, 1.1, 20_000, 1), zipf(200_000, 1.1, 20_000, 2)
    demand = column(ids)
    for lines in (100, 5000, 50_000):
        drawn = np.mean([len(set(part)) for part in np.split(fresh, 200_000 // lines)][:20])
        assert demand.distinct(lines) == pytest.approx(drawn, rel=0.05), lines
    assert demand.distinct(50_000) == len(set(ids))
    assert demand.distinct(200_000) == distinct_ids(demand.counts, 4).expected


STREAMS = ((1.05, 300_000), (0.8, 300_000), (0.0, 100_000))  # exponent and number of ids
OWN, STEPS = 64, 5  # lines of each of 1,024 ranks


@functools.cache
def drawn(lines: int, number: int, seed: int) -> torch.Tensor:
    exponent, ids = STREAMS[number]
    return torch.from_numpy(zipf(lines, exponent, ids, 10 * seed + number)) * 2**32 + number


def simulated(pieces: Sequence[PlacedColumns], ranks: int, *, dedup: bool) -> float:
    """Ids of the fullest rank by the mean, on average over steps with ids that no sample has."""
    result = []
    for step in range(STEPS):
        loads = torch.zeros(ranks, dtype=torch.int64)
        for piece in pieces:
            sent = drawn(OWN * ranks, piece.table, step)
            if dedup:
                sent = ops.unique_ids(sent, torch.arange(0, len(sent) + 1, OWN)).ids
            owners = part_of(sent, len(piece.ranks)) + piece.ranks.start
            loads += owners.bincount(minlength=ranks)
        result.append(float(loads.max() / loads.double().mean()))
    return float(np.mean(result))


@functools.cache
def sampled() -> list[ColumnDemand]:
    return [column(drawn(200_000, number, 77)) for number in range(len(STREAMS))]


@pytest.mark.parametrize(("sharding", "dedup"), VARIANTS)
def test_the_fullest_of_1024_ranks(sharding: Sharding, dedup: bool) -> None:
    """The input of 1,024 ranks is routed by the owner of each id; no row is looked up."""
    demands, asked = sampled(), wishes([1024], 1024 * OWN)
    pieces, _ = modelled_step(demands, ROW, asked, 1024, sharding, dedup=dedup)
    predicted = case_of(demands, ROW, asked, 1024, sharding, dedup=dedup)["fullest"]
    expected = simulated(pieces, 1024, dedup=dedup)
    assert predicted["lookups"] == pytest.approx(expected, rel=0.05)


# -- memory and time ---------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_memory_is_that_of_the_tables(sharding: Sharding) -> None:
    columns = [column(np.arange(100), total=total) for total in (8000.0, 4000.0, 800.0)]
    case = case_of(columns, ROW, wishes([16], 16), 16, sharding, dedup=False)
    shards = case["column_shards"]
    part = PlannedRow(8 // shards, "sgd", "float32", "float32")
    whole = shards * in_memory(part, 12_800, ranks=1).memory
    assert 16 * case["memory"]["mean"] == pytest.approx(whole, rel=1e-3)
    assert case["memory"]["fullest"] >= case["memory"]["mean"]
    if sharding == "table_wise":
        largest = in_memory(ROW, 8000, ranks=1).memory
        assert case["memory"]["fullest"] == pytest.approx(largest, rel=1e-3)


def test_time_is_that_of_work_and_links() -> None:
    columns = [column(np.arange(1000))]
    alone = case_of(columns, ROW, wishes([8], 800), 8, "table_wise", dedup=False)["seconds"]
    crowded = wishes([8], 800, cores=2)
    shared = case_of(columns, ROW, crowded, 8, "table_wise", dedup=False)["seconds"]
    assert shared["links"] == alone["links"]
    # the owner: 1 ms, 100 ids of its own, 800 lengths beside 100 that it sends, 800 ids with 32
    # bytes each, as many of the outputs and 3,200 of its own, and 800 rows of 36 bytes
    work = 1e6 + 100 + 900 + 800 + 800 * 32 + (800 * 32 + 100 * 32) + 800 * 36
    assert alone["own_work"] == pytest.approx(1e-9 * work, rel=1e-6)
    # two cores do all of it, and of seven ranks 100 ids, lengths and bags each
    all_work = work + 7 * (1e6 + 100 + 100 + 100 * 32)
    assert shared["own_work"] == pytest.approx(1e-9 * all_work / 2, rel=1e-6)
    # splits, lengths, ids, rows, gradients: of one owner, to seven others
    sizes = 40 + 4 * 100 + 8 * 100 + 2 * 32 * 100
    assert alone["links"] == pytest.approx(5 * 7e-5 + 7 * sizes / 2e9, rel=1e-6)


def test_columns_that_come_together_are_copied() -> None:
    columns = [column(np.arange(1000))] * 2
    asked = wishes([2], 200)
    (_, whole), (pieces, apart) = (
        modelled_step(columns, ROW, asked, 2, sharding, dedup=False)
        for sharding in ("table_wise", "column_wise")
    )
    assert len(pieces) == 4
    copied = 100 * 2 * 8 * 4  # bags of two tables
    assert torch.equal(apart.work.output_bytes, whole.work.output_bytes + copied)
    assert torch.equal(apart.work.ids_received, 2 * whole.work.ids_received)


def test_what_stops_paying() -> None:
    columns = [column(np.arange(1000))]
    counts, later = {"id": columns[0].counts}, {"id": _Exactly(1000.0)}
    free = Links(1e18, 1e18, 0.0)
    costs = OpCosts(0.0, 0.0, 0.0, 0.0, 1000.0, 0.0, 0.0, 0.0, source="a test")

    def paying(**more: Any) -> dict[str, dict[str, Any]]:
        model = modelled(counts, later, ROW, wishes([1, 8, 64], 1 << 16, **more))  # type: ignore
        return {pays["sharding"]: pays for pays in model["pays_up_to"] if not pays["dedup"]}

    by_work = paying(links=free, costs=costs)
    assert by_work["row_wise"]["ranks"] == 64
    assert by_work["row_wise"]["reason"] is None
    assert by_work["table_wise"]["ranks"] == 1  # one rank has the table
    assert by_work["table_wise"]["reason"] == "the step takes no less time"
    fixed = OpCosts(3e4, 0.0, 0.0, 0.0, 1000.0, 0.0, 0.0, 0.0, source="a test")
    # 65.5 ms of ids, divided, and 30 ms: 46 ms with 4 ranks, 38 ms with 8, which do 0.31 as much
    assert paying(links=free, costs=fixed)["row_wise"]["ranks"] == 4
    assert "less than half" in paying(links=free, costs=fixed)["row_wise"]["reason"]


class _Exactly:
    def __init__(self, ids: float) -> None:
        self.low = self.expected = self.high = ids
