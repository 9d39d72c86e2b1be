"""Every benchmark runs and prints rows of the agreed form; no time is checked."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from torch_dynemb._library.op_names import op_names

pytestmark = pytest.mark.cpu_only("a program, in a process of its own")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HAS_ABSL = (
    shutil.which("pkg-config") is not None
    and subprocess.run(["pkg-config", "--exists", "absl_flat_hash_map"], check=False).returncode
    == 0
)
ROW_KEYS = {"bench", "case", "ours_ms", "peer", "peer_ms", "ratio", "valid"}
SMALL = {
    "index": ["--keys", "20000", "--peers", "absl::flat_hash_map", "--only", "1 thread"],
    "train_step": ["--rows", "500", "--batch", "16", "--dims", "16", "--only", "nn.EmbeddingBag"],
    "growth": ["--ids", "200000", "--batch", "10000", "--memory-ids", "65536"],
    "scale": ["--ids", "20000", "--batch", "1000"],
    "overhead": ["--calls", "2", "--only", "eager: nn.Embedding"],
    "lifecycle": ["--capacity", "5000", "--batch", "400", "--stream", "20000"],
    "dlrm": [
        *("--batches", "16", "--fill", "500", "--threads", "1", "--only", "making the vocabulary"),
        *("--only", "eager: one nn", "--only", "eager: dynamic"),
    ],
    "two_ranks": ["--steps", "2", "--only", "steps: static, 2"],
    "assign": ["--ids", "4000"],
    "optimizers": [
        *("--rows", "500", "--batch", "16", "--dims", "16", "--memory-ids", "1000"),
        *("--only", "our Adam", "--only", "nn.EmbeddingBag"),
        *("--only", "an id, Adam", "--only", "against fp32"),
    ],
    "torchrec_step": [
        *("--tables", "2", "--rows", "500", "--batch", "8", "--dim", "8", "--bags", "2"),
        *("--only", "SGD L=2, dynamic", "--only", "row_wise SGD L=2, 1 %"),
    ],
    "replica_sync": ["--ids", "500", "--dim", "8", "--only", "10 %"],
    "scale_out": [
        *("--part", "bytes", "--part", "times", "--only", "table_wise, dedup, 2"),
    ],
    "feature_ops": ["--features", "3", "--rows", "20", "--calls", "1"],
    "ragged": ["--features", "3", "--dim", "4", "--rows", "50"],
    "checkpoint": ["--ids", "26000"],
    "delta": ["--ids", "5000"],
    "freshness": ["--seconds", "4", "--only", "event to answer"],
    "quantized_rows": ["--mib", "1", "--only", "int8 rows, D=16"],
    "tiers": [
        *("--part", "reads", "--megabytes", "2", "--reads", "200"),
        *("--part", "training", "--ids", "2000", "--batch", "16", "--only", "4 KB"),
        *("--only", "Zipf 1.5, prefetch"),
    ],
    "retrieval": ["--ids", "2000"],
    "live_serving": ["--ids", "2000", "--only", "D=16"],
    "serving": ["--ids", "100", "--calls", "2", "--only", "Python, B=1 "],
    "serving_load": ["--ids", "100", "--only", "Python: "],
    "remote_rows": ["--ids", "2000", "--calls", "2", "--only", "one server, 256"],
    "file_rows": [
        *("--ids", "2000", "--calls", "2", "--only", "Zipf 1.2, 25", "--only", "half of the"),
    ],
    "shared_tables": ["--ids", "2000", "--calls", "2"],
    "many_tables": ["--only", "10 tables", "--only", "batch 10000 "],
    "dcp_load": ["--megabytes", "1", "--only", "Adam D=16, 1 rank"],
    "live_resharding": ["--ids", "2000", "--only", "table_wise to row_wise"],
}
SLOW = (  # 5 seconds and more each
    *("assign", "checkpoint", "dcp_load", "feature_ops", "file_rows", "freshness", "index"),
    *("lifecycle", "many_tables"),
    *("live_resharding", "live_serving", "optimizers", "overhead", "remote_rows", "replica_sync"),
    *("retrieval", "scale_out", "serving", "serving_load", "shared_tables"),
    *("torchrec_step", "two_ranks"),
)
TORCHREC = (
    *("dcp_load", "lifecycle", "live_resharding", "replica_sync", "scale_out", "torchrec_step"),
    "two_ranks",
)


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    """Runs a benchmark as its command line does, in this process: torch is imported already."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")


@pytest.mark.long_cases("train_step", "growth", "dlrm", "ragged", "delta", "quantized_rows")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n in SLOW else n for n in SMALL]
)
def test_prints_one_json_line_per_case(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "index" and not HAS_ABSL:
        pytest.skip("libabsl-dev is not installed; index.py compares with its hash map")
    if name in TORCHREC and importlib.util.find_spec("torchrec") is None:
        pytest.skip(f"torchrec, which {name}.py compares with, is missing")
    if name == "tiers" and shutil.which("fio") is None:
        pytest.skip("fio, which tiers.py compares with, is not installed")
    run(monkeypatch, name, "--json", "--quick", "--rounds", "1", *SMALL[name])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows
    assert len({(row["case"], row["peer"]) for row in rows}) == len(rows)
    for row in rows:
        assert set(row) >= ROW_KEYS
        assert row["bench"] == name
        assert row["valid"] is True  # rates of peers are only noted for full sizes
        if row["ours_ms"] is None:
            assert row["unit"]
        else:
            assert row["ratio"] == pytest.approx(row["ours_ms"] / row["peer_ms"], rel=1e-3)
        if "target" in row:
            assert row["met"] == (row["ratio"] <= row["target"])


@pytest.mark.long
def test_calls_of_kernels_that_do_nothing() -> None:
    # a process of its own: its kernels do not come back
    options = ["--json", "--quick", "--rounds", "1", "--calls", "2", "--only", "1 bag, training"]
    done = subprocess.run(
        [sys.executable, "overhead.py", "--no-kernels", *options, "--only", "1 id, inference"],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line)["case"] for line in done.stdout.splitlines()]
    assert len(cases) == 6
    assert all(case.endswith(", no kernels") for case in cases)


@pytest.mark.long
def test_snapshots_and_memory_of_tables_in_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio, which tiers.py compares with, is not installed")
    parts = ["--part", "snapshot", "--part", "memory", "--ids", "3000"]
    run(monkeypatch, "tiers", "--json", "--quick", "--rounds", "1", *parts)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["case"].split()[0] for row in rows] == ["memory", "snapshot,"]
    assert rows[1]["ratio"] > 0


@pytest.mark.long
def test_rows_are_compared_with_rocksdb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from peers.build import has_rocksdb

    if not has_rocksdb() or shutil.which("fio") is None:
        pytest.skip("librocksdb-dev or fio, which tiers.py compares with, is not installed")
    small = ["--rows", "3000", "--reads", "200"]
    run(monkeypatch, "tiers", "--json", "--quick", "--rounds", "1", "--part", "logs", *small)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    peers = [row["peer"] for row in rows]
    assert sum("MultiGet" in peer for peer in peers) == 3
    assert sum(row["unit"] == "bytes" for row in rows if row["ours_ms"] is None) == 2
    assert all(row["valid"] for row in rows)


@pytest.mark.long
def test_every_op_is_timed_or_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from single_ops.left_out import LEFT_OUT

    run(monkeypatch, "ops", "--json", "--quick", "--rounds", "1", "--calls", "1")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted([*(row["case"] for row in rows), *LEFT_OUT]) == op_names()
    assert all(row["value"] >= row["value_min"] > 0 for row in rows)
    assert {row["unit"] for row in rows if row["case"].startswith(("find", "adam"))} == {"ns an id"}
    counts = {row["case"]: row["count"] for row in rows}
    assert counts["find_or_insert_"] > 3000  # calls of small_shapes, larger than those of tests


@pytest.mark.parametrize("dim", [3, 16])
def test_the_lookup_by_hand_finds_rows(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from peers.ragged_tables import ReferenceTable

    rows, numbers = torch.rand(1000, dim), torch.randint(1000, (700,))
    ids, offsets = torch.arange(1000) * 0x9E3779B97F4A7C1 - 40, torch.tensor([0, 0, 30, 31, 700])
    expected = torch.nn.functional.embedding_bag(
        numbers, rows, offsets, mode="sum", include_last_offset=True
    )
    torch.testing.assert_close(ReferenceTable(rows, ids)(ids[numbers], offsets), expected)


def test_the_values_by_hand_are_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from peers.initial_rows import NormalRows

    values = NormalRows(24).compute().double().flatten().sort().values
    normal = torch.special.ndtri((torch.arange(512, dtype=torch.float64) + 0.5) / 512)
    assert (values - normal).abs().mean() < 0.1


def test_a_table_is_printed_without_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only = "1 id, inference, eager"
    run(monkeypatch, "overhead", "--quick", "--rounds", "1", "--calls", "2", "--only", only)
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["bench", "case"]
    assert [row.split("  ")[:2] for row in rows] == [["overhead", only]]


def test_an_unknown_benchmark_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "run", "speed")
    expected = (
        "NAME='speed': expected one of index, train_step, growth, scale, many_tables, overhead, "
        "dlrm, two_ranks, lifecycle, assign, optimizers, retrieval, torchrec_step, replica_sync, "
        "scale_out, feature_ops, ragged, dcp_load, live_resharding, checkpoint, delta, freshness, "
        "tiers, live_serving, serving, serving_load, remote_rows, file_rows, shared_tables, "
        "quantized_rows, ops"
    )
    assert expected in capsys.readouterr().err


def test_first_evictions_have_curves_to_plot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "lifecycle", "--quick", "--json", "--only", "first eviction")
    ours, one_bucket = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    for row in (ours, one_bucket):
        assert len(row["used"]) == len(row["evicting"]) > 100
        assert row["used"] == sorted(row["used"])
        assert row["used"][0] == row["evicting"][0] == 0
    assert ours["value"] == 0 < one_bucket["value"]


def test_bytes_of_an_id_as_markdown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "optimizers", "--quick", "--memory-table")
    _, rule, *lines = capsys.readouterr().out.splitlines()
    assert set(rule) == {"|", "-"}
    bytes_of = {tuple(cells[:3]): cells[3:] for cells in (re.findall(r"[^| ]+", x) for x in lines)}
    assert len(lines) == 14
    assert bytes_of["Adam", "bf16", "8-bit"][:2] == ["260", "264"]
    assert all(sum(map(int, c[-4:-1])) == int(c[-1]) for c in bytes_of.values())


def test_the_exact_cache_evicts_by_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from eviction.reference import ExactCache

    draws = np.random.default_rng(0).zipf(1.3, size=(200, 12)) % 60
    ids = np.random.default_rng(1).permutation(60)
    for score in ("step", "frequency"):
        cache, scores, hits = ExactCache(ids, 20, score=score), {}, 0
        for step, batch in enumerate(draws):
            known = set(scores)
            for number in batch:
                if number in known:
                    frequency = scores[number][0] + (score == "frequency")
                    scores[number] = (frequency, step, ids[number])
                    hits += 1
            for number, count in Counter(batch.tolist()).items():
                if number in known:
                    continue
                if len(scores) == 20:
                    victim = min(rank for rank in scores.values() if rank[1] < step)
                    del scores[next(n for n, rank in scores.items() if rank == victim)]
                scores[number] = (count if score == "frequency" else 0, step, ids[number])
            hits -= cache.look_up(batch)
            assert hits == 0
        assert len(cache) == 20


@pytest.mark.long
def test_eviction_by_hand_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that our step with eviction is measured against does what such a step is."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from common.id_streams import distinct_ids
    from peers.evicting_table import DIM, INITIAL_VALUE, LEARNING_RATE, EvictingTable

    torch.set_num_threads(1)
    ids = distinct_ids(0, 600)
    generator = torch.Generator().manual_seed(0)
    table = EvictingTable(ids[:500], batch=100, frequent=False)
    rows = torch.full((600, DIM), INITIAL_VALUE)
    squares = torch.zeros(600, 1)
    known, new = torch.arange(400, 480), torch.arange(500, 520)
    for numbers in (known, torch.cat([known[:60], new]), torch.cat([known[:60], new])):
        bags = numbers[torch.randperm(80, generator=generator)].view(16, 5)
        gradient = torch.randn(16, DIM, generator=generator)
        right = torch.isclose(table.train(ids[bags.flatten()], gradient), rows[bags].sum(1))
        # an index that leaves no tombstones loses some of the ids that passed a victim
        assert right.all(1).sum() >= (16 if not squares[new].any() else 12)
        squares[bags] += gradient.square().mean(1).view(16, 1, 1)
        steps = gradient.unsqueeze(1) / (squares[bags].sqrt() + 1e-8)
        rows[bags] -= LEARNING_RATE * steps
    generations = table.look_up(ids[500:520]) & ((1 << 28) - 1)
    assert (generations > 1).sum() > 15  # rows of earlier owners


@pytest.mark.skipif(not HAS_ABSL, reason="the peers are compiled together, and need abseil")
@pytest.mark.parametrize("squares", [False, True], ids=["SGD", "RowWiseAdagrad"])
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_hash_table_by_hand_trains(
    monkeypatch: pytest.MonkeyPatch, squares: bool, dtype: torch.dtype, split: bool
) -> None:
    """The kernel that our step is measured against does what a step is."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from common.id_streams import distinct_ids
    from peers.static_tables import LEARNING_RATE, HashedTable

    torch.set_num_threads(2)
    ids = distinct_ids(0, 500)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(500, (64, 20), generator=generator)
    numbers[:, :3] = 7  # an id of many occurrences
    gradient = torch.randn(64, 16, generator=generator)
    table = HashedTable(ids, 16, squares=squares, dtype=dtype, split=split)
    before = table.weights().float()
    output = table.step(ids[numbers], gradient)
    torch.testing.assert_close(output, before[numbers].sum(1))
    of_rows = torch.zeros_like(before)
    of_rows.index_add_(0, numbers.flatten(), gradient.repeat_interleave(20, 0))
    root = of_rows.square().mean(1, keepdim=True).sqrt() + 1e-8
    expected = before - LEARNING_RATE * (of_rows / root if squares else of_rows)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11 if dtype == torch.float16 else 0
    torch.testing.assert_close(
        table.weights().float(), expected, rtol=1e-4 + rounding, atol=1e-5 + rounding / 1024
    )
