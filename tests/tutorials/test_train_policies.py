"""Tables of bounded size in the DLRM tutorial: options, division of a capacity, results."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_dynemb as td
from tutorials.dlrm import options, train
from tutorials.dlrm.data import Batch
from tutorials.dlrm.job import policies
from tutorials.dlrm.job.policies import admission_rule, count_ids, divide, make_policies
from tutorials.dlrm.model import DynamicRows
from tutorials.dlrm.sweeps import capacity, job_runs

pytestmark = [
    pytest.mark.cpu_only("the job of a tutorial, on the CPU"),
    pytest.mark.usefixtures("same_threads_afterwards", "no_report"),
]

SMALL = ["--samples", "3000", "--batch-size", "256", "--embedding-dim", "4", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("policies")


def run(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    capsys.readouterr()
    folders = ["--samples-folder", str(folder / "samples"), "--out", str(folder / "out")]
    train.main([*SMALL, *folders, *arguments])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    del result["samples_per_s"]
    return result


# -- options ---------------------------------------------------------------------------------------


def test_defaults():
    opts = options.parse([])
    assert (opts.capacity, opts.eviction, opts.admission) == (None, None, None)
    assert options.parse(["--capacity", "100"]).eviction == "lfu"
    opts = options.parse(["--capacity", "99", "--eviction", "lru", "--admission", "chance:0.1"])
    assert (opts.capacity, opts.eviction, opts.admission) == (99, "lru", "chance:0.1")
    # a run cannot be resumed with others
    assert options.settings_of_job(opts)["--capacity"] == 99
    assert options.settings_of_job(opts)["--eviction"] == "lru"
    assert options.settings_of_job(opts)["--admission"] == "chance:0.1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--capacity 0", "--capacity: expected an integer from 26 on, got '0'"),
        ("--capacity 25", "--capacity: expected an integer from 26 on, got '25'"),
        ("--capacity 10%", "--capacity: expected an integer from 26 on, got '10%'"),
        ("--capacity 99 --eviction fifo", "--eviction: invalid choice: 'fifo'"),
        ("--eviction lru", "--eviction: lru needs a table that can be full: give --capacity"),
        ("--eviction none", "--eviction: none needs a table that can be full: give --capacity"),
        *(
            (f"--admission {rule}", f"or chance:0.1, got '{rule}'")
            for rule in (
                *("often", "count", "count:", "count:x", "count:0", "count:2:1MB"),
                *("sketch:2", "sketch:2:1furlong", "sketch:2:8", "sketch:0:1MB"),
                *("chance:0", "chance:1.5", "chance:x", "chance"),
            )
        ),
    ],
)
def test_contradictions_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        options.parse(arguments.split())
    assert message in capsys.readouterr().err


def test_rules():
    assert doctest.testmod(policies).failed == 0
    assert admission_rule("count:3") == td.AdmitFrequent(3)
    assert admission_rule("chance:0.1") == td.AdmitByChance(0.1)
    assert admission_rule("sketch:2:64KiB") == td.AdmitFrequentSketch(2, 65536)
    assert admission_rule("sketch:2:64KiB", 1e-9) == td.AdmitFrequentSketch(2, 16)


# -- division --------------------------------------------------------------------------------------


@given(
    counts=st.lists(st.integers(1, 10_000), min_size=1, max_size=30),
    more=st.integers(0, 100_000),
)
def test_division(counts, more):
    limit = len(counts) + more
    shares = divide(limit, counts)
    assert min(shares) >= 1
    assert sum(shares) <= limit
    assert sum(shares) >= min(limit, sum(counts)) - len(counts)  # nothing is lost but by rounding
    for share, count in zip(shares, counts, strict=True):
        if share < count:  # it could use more: no other one has more
            assert max(s for s, c in zip(shares, counts, strict=True) if c >= count) <= share + 1
            assert share + 1 >= limit // len(counts)


def test_ids_are_counted_until_there_are_enough():
    def batch(ids: list[int]) -> Batch:
        columns = np.tile(np.asarray(ids), (26, 1))
        columns[3] = 7
        return Batch(
            np.zeros(len(ids), np.float32), np.zeros((len(ids), 13), np.int64), columns, len(ids)
        )

    batches = [batch([1, 2]), batch([2, 3]), batch([4, 5])]
    assert count_ids(batches, None) == [5, 5, 5, 1, *[5] * 22]
    assert count_ids(batches, 52) == [3, 3, 3, 1, *[3] * 22]
    assert count_ids(batches, 51) == [2, 2, 2, 1, *[2] * 22]
    assert count_ids([], None) == [1] * 26


def test_policies_of_tables():
    counts = [1, 3, 1000]
    of = {
        eviction: make_policies(capacity=30, eviction=eviction, admission=None, counts=counts)
        for eviction in ("lfu", "lru", "none")
    }
    for made in of.values():
        assert [policy.capacity for policy in made] == [1, 3, 26]
    assert of["lfu"][0].scores == ("frequency",)
    assert of["lru"][0].scores == ("step",)
    assert of["none"][0].scores == ("none",)
    assert [of[e][0].full(budget=False) for e in of] == ["evict", "evict", "default"]
    for policy, memory in zip(
        make_policies(capacity=None, eviction="none", admission="sketch:2:1004000", counts=counts),
        (1000, 3000, 1_000_000),
        strict=True,
    ):
        assert policy.capacity is None
        assert policy.scores == ("none",)
        assert isinstance(policy.admission, td.AdmitFrequentSketch)
        assert policy.admission.threshold == 2
        assert policy.admission.memory == pytest.approx(memory, abs=16)


def test_turnover_is_that_of_all_tables():
    def rows(**policy) -> DynamicRows:
        return DynamicRows(4, td.RowWiseAdagrad(0.1), policies=[td.Policy(**policy)] * 26)

    def turnover_of(rows: DynamicRows) -> tuple[int, int, int]:
        figures = rows.figures()
        return figures.evicted, figures.rejected, figures.not_admitted

    ids = torch.arange(26 * 12).view(26, 12)
    evicting = rows(capacity=10)
    for part in ids.split(6, dim=1):
        evicting(part).sum().backward()
        evicting.optimizer().step()
    turnover = evicting.figures()
    assert turnover.evicted > 26
    assert turnover.evicted + turnover.rejected == 26 * 2  # some find no victim in their buckets
    assert turnover.not_admitted == 0
    rejecting = rows(capacity=10, on_full="default")
    rejecting(ids)
    assert turnover_of(rejecting) == (0, 26 * 2, 0)
    choosing = rows(admission=td.AdmitFrequent(2))
    choosing(ids)
    before = choosing.figures().table_bytes
    assert turnover_of(choosing) == (0, 0, 26 * 12)
    assert before >= sum(s.counter_bytes for s in choosing.tables.group.usage.tables().values()) > 0


# -- from the command line to the result -----------------------------------------------------------


@pytest.fixture(scope="module")
def unlimited(folder) -> dict:
    opts = options.parse(
        [*SMALL, "--samples-folder", str(folder / "samples"), "--out", str(folder / "unlimited")]
    )
    threads = torch.get_num_threads()
    result = train.run(opts)
    torch.set_num_threads(threads)
    return result


def test_unlimited_tables_keep_everything(unlimited):
    assert unlimited["capacity"] is unlimited["eviction"] is unlimited["admission"] is None
    assert unlimited["evicted"] == unlimited["rejected"] == unlimited["not_admitted"] == 0


@pytest.mark.long
def test_evictions(folder, capsys, unlimited):
    limit = unlimited["ids"] // 4
    results = {}
    for eviction in ("lfu", "lru", "none"):
        result = run(folder, capsys, "--capacity", str(limit), "--eviction", eviction)
        results[eviction] = result
        assert (result["capacity"], result["eviction"]) == (limit, eviction)
        assert 0.9 * limit < result["ids"] <= limit
        assert result["table_bytes"] < unlimited["table_bytes"]
        # the hashed tables have the same bytes, hence fewer rows
        assert result["baseline_auc"] != unlimited["baseline_auc"]
    assert results["lfu"]["evicted"] > limit / 2
    assert results["lru"]["evicted"] > limit / 2
    assert results["none"]["evicted"] == 0
    assert results["none"]["rejected"] > results["lfu"]["rejected"]
    assert len({result["auc"] for result in results.values()}) == 3
    # scores of ids: none, one word, two words
    sizes = [results[name]["table_bytes"] for name in ("none", "lru", "lfu")]
    assert sizes == sorted(set(sizes))


@pytest.mark.long
def test_admission(folder, capsys, unlimited):
    results = [unlimited]
    for rule in ("count:2", "count:3", "sketch:3:1MB", "sketch:3:4KB", "chance:0.2"):
        result = run(folder, capsys, "--admission", rule, "--no-baseline")
        results.append(result)
        assert (result["admission"], result["capacity"]) == (rule, None)
        assert result["not_admitted"] > 1000
        assert result["evicted"] == result["rejected"] == 0
    everything, two, three, roomy, cramped, chance = (result["ids"] for result in results)
    assert three < two < everything / 2
    assert three <= roomy < 1.02 * three
    assert cramped > 1.05 * three  # counts are too large where ids share cells
    assert chance not in (everything, two, three)


def test_capacity_and_admission_together(folder, capsys, unlimited):
    limit = unlimited["ids"] // 8
    arguments = ["--capacity", str(limit), "--admission", "chance:0.5", "--no-baseline"]
    result = run(folder, capsys, *arguments, "--progress-interval", "0", "--log-every", "2")
    assert result["ids"] <= limit
    assert result["evicted"] > 0
    assert result["not_admitted"] > 0
    train.main(
        [*SMALL, "--samples-folder", str(folder / "samples"), "--out", str(folder), *arguments]
    )
    shown = capsys.readouterr().err
    for name in ("evicted", "not_admitted"):
        assert re.search(rf"\b{name}=[\d,]+", shown)


def test_seed_decides_with_a_capacity(folder, capsys):
    arguments = ["--capacity", "3000", "--admission", "chance:0.5", "--no-baseline"]
    assert run(folder, capsys, *arguments) == run(folder, capsys, *arguments)


def test_capacity_curve(tmp_path, monkeypatch):
    """What is in the file is not run again."""
    made = []

    def fake(opts: list[str]) -> dict:
        made.append(" ".join(opts))
        size = int(opts[1]) if opts[0] == "--capacity" else 10_000
        return {"ids": 10_000, "table_bytes": 130 * size, "auc": 0.7, "baseline_auc": 0.6}

    monkeypatch.setattr(job_runs, "_run", fake)
    out = ["--out", str(tmp_path), "--rules", "count:2"]
    capacity.main([*out, "--shares", "0.01", "1", "--seed", "5"])
    assert sorted(made) == [
        "--capacity 100 --admission count:2 --no-baseline --seed 5",
        "--capacity 100 --seed 5",
        "--capacity 10000 --admission count:2 --no-baseline --seed 5",
        "--capacity 10000 --seed 5",
        "--no-baseline --seed 5",
    ]
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    made.clear()
    capacity.main([*out, "--shares", "0.01", "0.5", "--seed", "5"])
    assert sorted(made) == [
        "--capacity 5000 --admission count:2 --no-baseline --seed 5",
        "--capacity 5000 --seed 5",
    ]
    made.clear()
    capacity.main([*out, "--shares", "1", "--seed", "6"])  # another job
    assert len(made) == 3
    made.clear()
    capacity.main([*out[:2], "--shares", "1", "--seed", "6"])
    assert made == ["--capacity 10000 --admission chance:0.3 --no-baseline --seed 6"]
