"""Sharded tables in a store, compared with tables in memory."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from record_dict import RecordDict
from sharded_models import Table, kernels, sharded
from storage_steps import Trained, trained

import torch_dynemb as td
from torch_dynemb.storage.tiers.sharing import part_of_storage
from torch_dynemb.torchrec import TableOptions
from torch_dynemb.torchrec.planning.plan_checks import check_storage_device

# what stores have on each rank: tables of theirs, or directories of all ranks
STORED = {
    "dict": [
        ["pooled.rows", "pooled.split.columns0to4", "sequence.rows"],
        [
            "pooled.rows",
            "pooled.split.columns4to8",
            "pooled.whole",
            "sequence.rows",
            "sequence.whole",
        ],
    ],
    "disk": [
        [
            "pooled/rows/rank0of2",
            "pooled/rows/rank1of2",
            "pooled/split.columns0to4/rank0of2",
            "pooled/split.columns4to8/rank1of2",
            "pooled/whole/rank1of2",
            "sequence/rows/rank0of2",
            "sequence/rows/rank1of2",
            "sequence/whole/rank1of2",
        ]
    ]
    * 2,
}

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


def check_same(tiered: Trained, plain: Trained) -> None:
    for one, other in zip(plain.outputs, tiered.outputs, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(plain.rows, tiered.rows, strict=True):
        assert torch.equal(one, other)
    assert tiered.sizes == plain.sizes


@pytest.mark.long
@pytest.mark.parametrize("dedup", [False, True])
def test_tiered_tables_are_trained_as_tables_in_memory(
    two_ranks: Ranks, tmp_path: Path, dedup: bool
) -> None:
    plain = two_ranks.run(trained, "memory", "", False, dedup)
    kinds = ("disk",) if dedup else ("disk", "dict")
    for kind, prefetching in itertools.product(kinds, (False, True)):
        path = tmp_path / f"{kind}{prefetching}"
        tiered = two_ranks.run(trained, kind, str(path), prefetching, dedup)
        for rank, (of_rank, alone) in enumerate(zip(tiered, plain, strict=True)):
            check_same(of_rank, alone)
            if not dedup:  # else no table is split by columns
                assert of_rank.stored == STORED[kind][rank]
            for stats in of_rank.stats:
                assert stats.evicted > 0
                assert (stats.prefetched > 0) == prefetching


@pytest.mark.long
def test_rows_beyond_hbm_are_plain_memory_on_the_cpu(two_ranks: Ranks) -> None:
    plain, split = (two_ranks.run(trained, kind, "", True, False) for kind in ("memory", "host"))
    for of_rank, alone in zip(split, plain, strict=True):
        check_same(of_rank, alone)
        assert of_rank.stats == [None] * len(of_rank.stats)


@pytest.mark.long
def test_rows_beneath_a_cache_on_gpus(two_ranks: Ranks, tmp_path: Path) -> None:
    plain = two_ranks.run(trained, "hbm", "", True, False)
    for kind in ("cache", "cache above a disk"):
        cached = two_ranks.run(trained, kind, str(tmp_path / "rows"), True, False)
        for of_rank, alone in zip(cached, plain, strict=True):
            check_same(of_rank, alone)
            for stats in of_rank.stats:
                assert stats.evicted > 0
                assert stats.prefetched > 0


def test_tables_with_different_storage_share_no_kernel(one_rank: None) -> None:
    first, second = RecordDict(), RecordDict()
    storage = {
        "a": td.ExternalStore(first),
        "b": td.ExternalStore(first),
        "c": td.ExternalStore(first, cache="64 rows"),
        "d": td.ExternalStore(second),
        "e": None,
        "f": None,
    }
    tables = [Table(name, 8, (f"f_{name}",)) for name in storage]
    options = {name: TableOptions(storage=of_table) for name, of_table in storage.items()}
    model = sharded(tables, options=options)
    together = [[shard.name for shard in kernel.tables.shards] for kernel in kernels(model)]
    assert together == [["a", "b"], ["c"], ["d"], ["e", "f"]]


def test_groups_and_ranks_have_directories_of_their_own() -> None:
    store = td.SSDStore("rows", cache="10 rows")

    def path(module: str, *tables: str, rank: int = 0) -> str:
        part = part_of_storage(store, module, tables, rank=rank, ranks=2)
        assert isinstance(part, td.SSDStore)
        assert part.cache == store.cache
        return str(part.path)

    assert path("model.bags", "a", "b") == "rows/model.bags/a+b/rank0of2"
    assert path("model.bags", "a", "b", rank=1) == "rows/model.bags/a+b/rank1of2"
    assert path("", "a") == "rows/a/rank0of2"
    long = "table" * 60
    names = [
        path(module, *tables)
        for module in ("bags", "rows", "..", "a/b", "Ä")
        for tables in (["a+b"], ["a", "b"], ["a/b"], [".."], ["%2E."], [long], [long, long])
    ]
    assert len(set(names)) == len(names)
    for name in names:
        top, *parts = Path(name).parts
        assert top == "rows"
        assert len(parts) == 3
        assert all(re.fullmatch(r"[A-Za-z0-9%_+~-][A-Za-z0-9%._+~-]{0,130}", p) for p in parts)


def test_a_device_without_storage_is_refused_by_name() -> None:
    options = {"a": TableOptions(), "b": TableOptions(storage=td.SSDStore("rows"))}
    check_storage_device("EmbeddingBagCollection", options, torch.device("cpu"))
    check_storage_device("EmbeddingBagCollection", {"a": options["a"]}, torch.device("cuda", 1))
    host = {"a": TableOptions(storage=td.HostStore())}
    check_storage_device("EmbeddingBagCollection", host, torch.device("cuda", 1))
    with pytest.raises(
        ValueError,
        match=r"table 'b' has storage SSDStore\(.*device is cuda:1, .*give device_cache=",
    ):
        check_storage_device("EmbeddingBagCollection", options, torch.device("cuda", 1))


def test_state_dicts_are_refused_and_checkpoints_go_both_ways(
    one_rank: None, tmp_path: Path
) -> None:
    models = []
    for storage in (td.ExternalStore(RecordDict(), cache="64 rows"), None):
        options = {"a": TableOptions(storage=storage)}
        models.append(sharded([Table("a", 8, ("f",))], options=options, optimizer=td.Adam(lr=0.1)))
    tiered, plain = (next(iter(kernels(model))).tables.group for model in models)
    ids = torch.arange(150)
    tiered.insert_or_assign(0, ids, torch.randn(150, 8))
    with pytest.raises(RuntimeError, match=r"^state_dict: the rows of \['a'.*checkpoint\.save"):
        models[0].state_dict()
    td.checkpoint.save(tmp_path / "tiered", models[0])
    td.checkpoint.load(tmp_path / "tiered", models[1])
    assert torch.equal(plain.read(0, ids), tiered.read(0, ids))
    plain.fill(0, 2.0)
    td.checkpoint.save(tmp_path / "plain", models[1])
    td.checkpoint.load(tmp_path / "plain", models[0])
    assert torch.equal(tiered.read(0, ids), torch.full((150, 8), 2.0))
