"""``plan --replay``: hit rates against exact simulations, AUC, samples of ids, what is refused."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from generated_streams import drifting

from torch_dynemb.__main__ import main
from torch_dynemb.plan.replay import outcome
from torch_dynemb.plan.replay.auc import error_of_difference, placements
from torch_dynemb.plan.replay.grammar import parse_capacities, parse_policies
from torch_dynemb.plan.replay.step_cost import step_cost

pytestmark = pytest.mark.cpu_only("a program that reads files")

BATCH = 10
HALF_LIFE = 4  # steps


def replay(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["plan", *map(str, arguments), "--dim", "8", "--replay", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)["replay"]
    return result


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["plan", *map(str, arguments), "--dim", "8"]) == 1
    reply = capsys.readouterr()
    assert reply.out == ""
    assert reply.err.startswith("error: ")
    assert reply.err.count("\n") == 1
    return reply.err


class ExactTable:
    """A table that compares all ids, one batch at a time; a dict of [score, last step]."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.policy, self.capacity = policy, capacity
        self.ids: dict[int, list[float]] = {}
        self.counts: dict[int, int] = {}
        self.evicted = self.step = 0

    def look_up(self, batch: list[int]) -> int:
        hits = sum(id in self.ids for id in batch)
        for id in dict.fromkeys(batch):
            times = batch.count(id)
            if id not in self.ids and not self._enters(id, times, batch):
                continue
            entry = self.ids.setdefault(id, [0.0, 0])
            if self.policy.endswith("lru"):
                entry[0] = self.step
            elif self.policy == "lfu":
                entry[0] += times
            else:
                entry[0] += times * 2.0 ** (self.step / HALF_LIFE)
            entry[1] = self.step
        self.step += 1
        return hits

    def _enters(self, id: int, times: int, batch: list[int]) -> bool:
        if self.policy.startswith("admit:2"):
            self.counts[id] = self.counts.get(id, 0) + times
            if self.counts[id] < 2:
                return False
        if len(self.ids) == self.capacity:
            victims = [(*entry, other) for other, entry in self.ids.items() if other not in batch]
            if not victims:
                return False
            del self.ids[int(min(victims)[2])]
            self.evicted += 1
        self.counts.pop(id, None)
        return True


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    random_ids = random.Random(0)
    stream = [int(random_ids.paretovariate(0.6)) % 300 + n // 100 for n in range(2000)]
    path = tmp_path_factory.mktemp("replay") / "ids.txt"
    path.write_text("".join(f"{id}\n" for id in stream))
    return path, stream


@pytest.mark.parametrize("policy", ["lru", "lfu", f"decayed:{HALF_LIFE}steps", "admit:2+lru"])
def test_hit_rates_are_those_of_exact_tables(
    ids: tuple[Path, list[int]], capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    path, stream = ids
    capacities = (12, 40, 80)  # tables of up to 89 ids compare all ids
    result = replay(
        capsys, path, "--policies", policy, "--capacities", "12,40,80", "--batch-size", BATCH
    )
    batches = [stream[n : n + BATCH] for n in range(0, len(stream), BATCH)]
    for run, capacity in zip(result["runs"][1:], capacities, strict=True):
        exact = ExactTable(policy, capacity)
        hits = [exact.look_up(batch) for batch in batches]
        assert run["hit_rate"] == pytest.approx(sum(hits[100:]) / 1000, abs=1e-12)
        assert run["rows"] == len(exact.ids)
        assert run["evictions_an_id"] == pytest.approx(exact.evicted / len(set(stream)))
    whole = result["runs"][0]
    known = [sum(id in stream[: n * BATCH] for id in batches[n]) for n in range(100, 200)]
    assert whole["hit_rate"] == pytest.approx(sum(known) / 1000)
    assert (whole["rows"], whole["evictions_an_id"]) == (len(set(stream)), 0)


def clicks(path: Path, lines: int) -> Path:
    """Write lines with a label that follows from two columns of ids, and a step a day."""
    arrow = pytest.importorskip("pyarrow")
    generator = torch.Generator().manual_seed(0)
    users = torch.randint(100, (lines,), generator=generator)
    ads = torch.randint(5, (lines,), generator=generator)
    logits = 2.0 * ((users * 7919) % 2 * 2 - 1) + (ads - 2)
    labels = torch.rand(lines, generator=generator) < logits.float().sigmoid()
    table = arrow.table(
        {
            "click": labels.tolist(),
            "time": [86_400 * n // 100 for n in range(lines)],
            "user": users.tolist(),
            "ads": [[ad, 77] if ad else [] for ad in ads.tolist()],
        }
    )
    pytest.importorskip("pyarrow.parquet").write_table(table, path)
    return path


@pytest.fixture(scope="module")
def clicked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clicks(tmp_path_factory.mktemp("clicks") / "clicks.parquet", 4000)


@pytest.mark.long
def test_auc_names_the_least_capacity_without_loss(
    clicked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [clicked, "--label", "click", "--time", "time", "--batch-size", 100]
    arguments += ["--policies", "lru,decayed:7d", "--capacities", "12,1"]
    result = replay(capsys, *arguments, "--plot", tmp_path / "replay.png")
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")
    assert (result["trained_lines"], result["steps"]) == (3600, 36)
    whole, *runs = result["runs"]
    assert 0.82 < whole["auc"] < 0.92  # that of the true log-odds is 0.90
    assert [run["capacity"] for run in runs] == [12, 105, 12, 105]
    for few, every in (runs[:2], runs[2:]):
        assert few["auc"] < whole["auc"] - 0.05
        assert every["auc"] == whole["auc"]
        assert few["auc_below_unlimited"] > 2 * few["auc_error"] > 0
    best = result["suggestion"]
    assert result["runs"][best] == runs[1]  # both policies keep all ids; lru has no score to keep
    assert "half_life=604800" in runs[2]["code"]
    assert runs[3]["rows_of_columns"] == {"user": 100, "ads": 5}

    assert main(["plan", *map(str, arguments), "--dim", "8", "--replay"]) == 0
    report = capsys.readouterr().out
    assert "Least memory without loss of AUC: lru, 100 % of the ids" in report
    assert f"{whole['auc']:.4f}" in report
    assert "The capacity of each column's table: user 100, ads 5" in report
    assert "GPUs have not been measured" in report


@pytest.mark.long
def test_a_sample_of_ids_estimates_the_hit_rates_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ids"
    path.write_text("".join(f"{id}\n" for id in drifting(200_000, 0).tolist()))
    arguments = [path, "--policies", "lru,lfu", "--capacities", "0.05,0.3", "--batch-size", 2000]
    every = replay(capsys, *arguments)
    some = replay(capsys, *arguments, "--sample-ids", "0.1")
    assert every["sampled_columns"] == {}
    (share,) = some["sampled_columns"].values()
    assert 0.1 <= share < 0.3  # at least 4,096 ids
    for all_ids, sampled in zip(every["runs"], some["runs"], strict=True):
        error = sampled["hit_rate_error"]
        assert 0 < error < 0.02
        assert abs(sampled["hit_rate"] - all_ids["hit_rate"]) < 4 * error
        assert sampled["rows"] == pytest.approx(all_ids["rows"], rel=0.1)
    monkeypatch.setattr("torch_dynemb.plan.replay.sampling.MOST_LOOKUPS", 100_000)
    assert main(["plan", *map(str, arguments), "--dim", "8", "--replay"]) == 0
    assert "a sample of the ids by hash is replayed" in capsys.readouterr().out


def test_criteo_has_a_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "criteo.tsv"
    lines = [[n % 2, *[n] * 13, *[f"{n % 5:x}"] * 26] for n in range(40)]
    path.write_text("\n".join("\t".join(map(str, line)) for line in lines))
    result = replay(capsys, path, "--label", "label", "--time", "I1", "--policies", "lfu")
    assert result["label"] == "label"
    path.write_text(path.read_text().replace("0\t", "x\t", 1))
    assert "line 1: label is 'x'" in refused(capsys, path, "--replay", "--label", "label")


def test_errors_of_auc_follow_resampling() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw() -> tuple[float, float]:
        labels = torch.rand(400, generator=generator) < 0.3
        signal = labels + torch.randn(400, generator=generator)
        one, other = (signal + torch.randn(400, generator=generator) for _ in range(2))
        a, b = placements(labels, one), placements(labels, other)
        return a.auc - b.auc, error_of_difference(a, b)

    differences, errors = torch.tensor([draw() for _ in range(300)]).T
    assert float(differences.std()) == pytest.approx(float(errors.mean()), rel=0.15)
    labels, tied = torch.tensor([False, False, True, True]), torch.tensor([0.1, 0.4, 0.4, 0.8])
    assert placements(labels, tied).auc == 0.875


def test_the_cost_of_a_step_is_that_of_the_newest_result(tmp_path: Path) -> None:
    assert step_cost("step", "cpu", tmp_path) is None
    for day, known in (("2026-01-02", 2.0), ("2026-01-01", 1.0)):
        row = {"case": "training step with eviction, LRU, 2 threads", "threads": 2}
        row |= {"batch": 1000, "peer_ms": known, "ns_an_eviction": 500.0}
        machine = {"device": "cpu", "processor": "some", "date": f"{day}T00:00"}
        (tmp_path / f"{day}.json").write_text(json.dumps({"machine": machine, "rows": [row]}))
    cost = step_cost("step", "cpu", tmp_path)
    assert cost is not None
    assert cost.step_ms(1000, 2000) == pytest.approx(3.0)
    assert cost.machine == "some, 2 threads, 2026-01-02"
    assert step_cost("frequency", "cpu", tmp_path) is None
    assert step_cost("step", "cuda", tmp_path) is None


def test_an_interrupted_replay_leaves_no_files(
    clicked: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[Path]] = []

    def interrupt(*_: object, **__: object) -> None:
        seen.append(list(tmp_path.glob("*/*")))
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(outcome.Run, "play", interrupt)
    arguments = ["plan", str(clicked), "--dim", "8", "--replay", "--columns", "user"]
    assert main(arguments) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert len(seen) == 1
    assert seen[0]  # files of lines
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policies", "lru"], "--policies is about a replay: add --replay"),
        (["--batch-size", "5"], "--batch-size is about a replay"),
        (["--replay", "--policies", "mru"], "names 'mru', expected lru, lfu or decayed:"),
        (["--replay", "--policies", "lru,,lfu"], "--policies names '', expected lru"),
        (["--replay", "--policies", "lru,lru"], "name every policy once"),
        (["--replay", "--policies", "admit:0+lru"], "'admit:0' is not an admission rule"),
        (["--replay", "--policies", "admit:2+chance:0.5+lru"], "expected one admission rule"),
        (["--replay", "--policies", "chance:2+lru"], "'chance:2' is not an admission rule"),
        (["--replay", "--policies", "decayed"], "names 'decayed', expected lru, lfu or"),
        (["--replay", "--policies", "decayed:0steps"], "is '0steps', expected from 1 to 2^32"),
        (["--replay", "--policies", "decayed:0%"], "is '0%', expected above 0 %"),
        (["--replay", "--policies", "decayed:-7d"], "is '-7d', expected seconds, or a text"),
        (["--replay", "--policies", "decayed:0s"], "is '0s', expected from 1 to 2^32"),
        (["--replay", "--policies", "decayed:7d"], "with a half-life in seconds: name a column"),
        (["--replay", "--capacities", "0"], "--capacities has '0', expected a share"),
        (["--replay", "--capacities", "-3"], "--capacities has '-3', expected a share"),
        (["--replay", "--capacities", "1.5"], "--capacities has '1.5', expected a share"),
        (["--replay", "--capacities", "nan"], "--capacities has 'nan', expected a share"),
        (["--replay", "--capacities", "5,5"], "give every capacity once"),
        (["--replay", "--sample-ids", "0"], "--sample-ids is '0', expected a share above 0"),
        (["--replay", "--label", "click", "--sample-ids", "0.1"], "a model of some ids"),
        (["--replay", "--label", "no"], "has no column 'no' of numbers: choose among click"),
        (["--replay", "--label", "ads"], "has no column 'ads' of numbers"),
        (["--replay", "--label", "time", "--columns", "user"], "time is 864 in line 2"),
        (["--replay", "--label", "click", "--time", "click"], "name two columns"),
        (["--replay", "--label", "user", "--columns", "user"], "which is a label or a time"),
        (["--replay", "--time", "user", "--columns", "ads"], "sort the lines by user"),
        (["--replay", "--plot", "no/such.png"], "make the folder no first"),
        (["--replay", "--plot", "x.xyz"], "use a name that ends in .png"),
    ],
)
def test_wrong_options(
    clicked: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert said in refused(capsys, clicked, *options)


def test_wrong_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "wrong.parquet"

    def said(labels: list[float | None], times: list[float | None]) -> str:
        columns = {"y": labels, "t": times, "id": list(range(len(labels)))}
        parquet.write_table(arrow.table(columns), path)
        return refused(capsys, path, "--replay", "--label", "y", "--time", "t")

    times: list[float | None] = [float(n) for n in range(20)]
    labels: list[float | None] = [n % 2 for n in range(20)]
    assert "y is nan in line 3 of the sample, expected 0 or 1" in said([0, 1, None], times[:3])
    assert "y is nan in line 2" in said([0.0, float("nan"), 1.0], times[:3])
    assert "y is 2 in line 1" in said([2.0, 0.5, 1.0], times[:3])
    assert "the sample has the label 1 alone" in said([1] * 20, times)
    assert "the last 2 lines, which are held out, have the label 0 alone" in said(
        [*labels[:18], 0, 0], times
    )
    assert "t is 1 in line 3 of the sample, after 5" in said(labels[:3], [0, 5, 1])
    assert "t is nan in line 1" in said(labels[:3], [None, 5, 6])
    assert "t is -1 in line 1" in said(labels[:3], [-1, 5, 6])
    (tmp_path / "ids").write_text("1\n2\n")
    assert "use Parquet" in refused(capsys, tmp_path / "ids", "--replay", "--label", "y")
    (tmp_path / "empty").write_text("")
    assert "is empty" in refused(capsys, tmp_path / "empty", "--replay")


def test_without_matplotlib(
    clicked: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in refused(capsys, clicked, "--replay", "--plot", "x.png")


def test_texts() -> None:
    lru, decayed, sampled = parse_policies("lru, admit:2+decayed:12h,chance:0.3+decayed:50%")
    assert repr(lru.policy(9, 100)) == "Policy(score='step', capacity=9)"
    assert decayed.policy(9, 100).half_life == 43_200
    assert repr(decayed.admission) == "AdmitFrequent(threshold=2)"
    assert sampled.policy(None, 100).half_life_steps == 50
    assert parse_capacities("0.05, 1,2, 1000") == [0.05, 1.0, 2, 1000]
