"""The DLRM job on many ranks: it is that of one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from job_steps import (
    Outcome,
    committed_job,
    interrupted_job,
    job,
    job_of_one_process,
    schedule,
    sends_once,
    stopped_job,
)
from ranks import Ranks
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from tutorials.dlrm import options, train
from tutorials.dlrm.data import FEATURE_NAMES
from tutorials.dlrm.job import checkpoint
from tutorials.dlrm.job import ranks as job_ranks
from tutorials.ranks import run_on_ranks

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

ROOT = Path(__file__).resolve().parent.parent.parent
# 5 batches and one sample, of which the second rank has none; held out: 2 and a part of one.
SMALL = [
    *f"--samples 1800 --held-out {519 / 1800} --batch-size 256 --log-every 1".split(),
    *["--embedding-dim", "8", "--threads", "1", "--lr", "0.05"],
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("job")
    return ["--samples-folder", str(folder / "samples"), "--out", str(folder / "out")]


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def assert_same(ours: Outcome, expected: Outcome) -> None:
    result, points = ours
    one, one_points = expected
    assert len(points) == 6
    for point, one_point in zip(points, one_points, strict=True):
        assert point.samples == one_point.samples
        assert point.loss == pytest.approx(one_point.loss, abs=1e-5)
        assert point.auc == pytest.approx(one_point.auc, abs=2e-3)
    differ = {"samples_per_s", "table_bytes", "auc"}
    assert result["auc"] == pytest.approx(one["auc"], abs=2e-3)
    for key in one.keys() - differ:
        assert result[key] == one[key], key


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise"])
def test_same_steps_as_one_process(two_ranks: Ranks, folders: list[str], sharding: str) -> None:
    # row-wise Adagrad has one value for a row, which column-wise sharding cannot have
    arguments = [*SMALL, *folders, "--optimizer", "adagrad"]
    expected = job_of_one_process(arguments)
    assert expected[0]["samples"] == 5 * 256 + 1
    result, other = two_ranks.run(job, [*arguments, "--sharding", sharding])
    assert other is None  # only rank 0 reports
    assert_same(result, expected)
    assert list(result[0]) == [*expected[0], "world_size", "sharding"]
    assert result[0]["world_size"] == 2
    assert result[0]["sharding"] == dict.fromkeys(FEATURE_NAMES, sharding)


def test_an_id_is_sent_once_where_its_table_allows_it(two_ranks: Ranks, folders: list[str]) -> None:
    for sharding, once in (("row_wise", True), ("table_wise", True), ("column_wise", False)):
        for of_rank in two_ranks.run(sends_once, [*SMALL, *folders, "--sharding", sharding]):
            assert of_rank
            assert set(of_rank) == {once}, sharding


@pytest.mark.long
def test_rows_in_files_are_those_in_memory(
    two_ranks: Ranks, folders: list[str], tmp_path: Path
) -> None:
    arguments = [*SMALL, *folders, "--optimizer", "adagrad"]
    in_memory, _ = two_ranks.run(job, [*arguments, "--sharding", "row_wise"])
    files = ["--storage", "ssd", "--cache", "10%", "--storage-path", str(tmp_path)]
    in_files, _ = two_ranks.run(job, [*arguments, *files, "--sharding", "row_wise"])
    assert in_files[1] == in_memory[1]
    assert in_files[0]["auc"] == in_memory[0]["auc"]
    assert in_memory[0]["storage"] is None
    did = in_files[0]["storage"]
    assert (did["kind"], did["cache"], did["prefetched"]) == ("ssd", "10%", 0)
    assert did["hits"] > 0
    assert in_files[0]["ids"] > did["stored"] > 0.5 * in_files[0]["ids"]


def test_same_life_cycle_as_one_process(two_ranks: Ranks, folders: list[str]) -> None:
    """Tables of bounded size; whole ones, since shards of their ids fill up one by one."""
    arguments = [*SMALL, *folders, "--capacity", "2000", "--eviction", "lru"]
    arguments += ["--admission", "count:2"]
    expected = job_of_one_process(arguments)
    assert expected[0]["evicted"] > 0
    assert expected[0]["not_admitted"] > 0
    result, _ = two_ranks.run(job, [*arguments, "--sharding", "table_wise"])
    assert_same(result, expected)


@pytest.mark.long
def test_bad_lines_are_left_out(two_ranks: Ranks, folders: list[str], tmp_path: Path) -> None:
    expected = job_of_one_process([*SMALL, *folders])
    (samples,) = Path(folders[1]).glob("*/samples.tsv")
    lines = samples.read_bytes().splitlines(keepends=True)
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"".join([*lines[:300], b"junk\n", *lines[300:]]))
    arguments = [*SMALL, str(path), *folders, "--on-bad-line", "skip", "--samples", "1801"]
    result, _ = two_ranks.run(job, [*arguments, "--held-out", str(519 / 1801)])
    assert result[0].pop("best_auc") is None
    del expected[0]["best_auc"]
    assert_same(result, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "first", "other"),
    [
        ("--optimizer adam --async-checkpoint", "row_wise", "column_wise"),
        ("--optimizer adagrad --admission count:2", "row_wise", "row_wise"),
        ("--capacity 2000 --eviction lru --admission count:2", "table_wise", "table_wise"),
    ],
)
def test_interrupted_job_goes_on(
    two_ranks: Ranks, folders: list[str], tmp_path: Path, options: str, first: str, other: str
) -> None:
    arguments = [*SMALL, *folders, *options.split(), "--checkpoint-every", "2"]
    expected = job_of_one_process(arguments)
    arguments += ["--out", str(tmp_path)]
    two_ranks.run(interrupted_job, [*arguments, "--sharding", first])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]
    result, _ = two_ranks.run(job, [*arguments, "--resume", "--sharding", other])
    assert_same(result, expected)
    for good, message in two_ranks.outcomes(job, [*arguments, "--resume", "--seed", "1"]):
        assert not good
        assert "--seed: 0 in the checkpoint, 1 now" in message


@pytest.mark.long
def test_a_job_goes_on_from_its_last_commit(
    two_ranks: Ranks, folders: list[str], tmp_path: Path
) -> None:
    arguments = [*SMALL, *folders, "--optimizer", "adam", "--checkpoint-every", "3"]
    expected = job_of_one_process(arguments)
    arguments += ["--out", str(tmp_path)]
    commits = [*arguments, "--commit-every", "1", "--resume"]
    two_ranks.run(committed_job, [*commits, "--sharding", "row_wise"], 2)
    two_ranks.run(committed_job, [*commits, "--sharding", "column_wise"], 4)  # behind a new base
    assert [path.name for path in tmp_path.glob("*/*")] == ["2"]
    (tmp_path / "commits" / "3" / "base.tmp").mkdir(parents=True)  # from a start that was killed
    result, _ = two_ranks.run(job, [*commits, "--sharding", "table_wise"])
    assert_same(result, expected)
    assert [path.name for path in tmp_path.glob("*/*")] == ["4"]
    for good, message in two_ranks.outcomes(job, [*arguments, "--resume"]):
        assert not good
        assert "has commits of the run: add --commit-every" in message


@pytest.mark.long
@pytest.mark.usefixtures("one_rank")
def test_one_rank_goes_on_with_what_two_have_saved(
    two_ranks: Ranks, folders: list[str], tmp_path: Path
) -> None:
    arguments = [*SMALL, *folders, "--admission", "count:2", "--checkpoint-every", "2"]
    expected = job_of_one_process([*arguments, "--out", str(tmp_path)])
    arguments += ["--out", str(tmp_path), "--sharding", "row_wise"]
    for good, message in two_ranks.outcomes(job, [*arguments, "--resume"]):
        assert not good
        assert "--torchrec: False in the checkpoint, True now" in message
    two_ranks.run(interrupted_job, arguments)
    result = job(0, [*arguments, "--resume"])
    assert result is not None
    assert_same(result, expected)


def test_a_schedule_reaches_tables_and_mlps(two_ranks: Ranks, folders: list[str]) -> None:
    rates = [*SMALL, *folders, "--lr", "0.4", "--dense-lr", "0.2", "--sharding", "table_wise"]
    for shown, of_tables in two_ranks.run(schedule, rates):
        assert sorted(shown) == pytest.approx([0.1, 0.2])
        assert len(of_tables) == 1
        for of_table in of_tables.values():
            assert of_table == pytest.approx([0.2] * 13)


# -- from the command line -------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    train.main(list(arguments))
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.long
def test_it_starts_its_processes(capsys: pytest.CaptureFixture[str], folders: list[str]) -> None:
    expected = run(capsys, *SMALL, *folders, "--no-baseline")
    result = run(capsys, *SMALL, *folders, "--torchrec", "--nproc", "2")
    assert list(result) == [*expected, "world_size", "sharding"]
    assert result["world_size"] == 2
    assert set(result["sharding"]) == set(FEATURE_NAMES)
    assert result["auc"] == pytest.approx(expected["auc"], abs=2e-3)
    assert result["ids"] == expected["ids"]
    assert (Path(folders[3]) / "training.png").exists()
    assert "<h2>Evictions by feature</h2>" in (Path(folders[3]) / "report.html").read_text()


def test_ranks_on_cpus_are_forks_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    forked_from = []

    def run_on_ranks(*arguments: Any, **how: Any) -> dict[str, Any]:
        forked_from.append(how["forked_from"])
        return {}

    monkeypatch.setattr(job_ranks, "run_on_ranks", run_on_ranks)
    monkeypatch.setattr(job_ranks, "_check", lambda opts: None)  # a GPU may be missing
    for device in ("cpu", "cuda"):
        job_ranks.run(options.parse(["--torchrec", "--nproc", "2", "--device", device]))
    assert forked_from == ["tutorials.dlrm.job.rank_imports", None]


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["--local-addr", "localhost"]  # asks no name server
    command += ["-m", "tutorials.dlrm.train", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_torchrun_starts_it(folders: list[str]) -> None:
    done = torchrun(*SMALL, *folders, "--torchrec", "--sharding", "row_wise")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["world_size"] == 2
    plan = "row_wise on ranks 0, 1: 26 tables, category_1,"
    assert done.stderr.count(plan) == 1


def test_what_torchrun_must_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "add --torchrec" in refused()
    assert "leave --nproc out" in refused("--torchrec", "--nproc", "2")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in refused("--torchrec")


def refused(*arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        train.main(list(arguments))
    assert isinstance(caught.value.code, str)
    return caught.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--nproc 2", "argument --nproc: 2 is about many processes: add --torchrec"),
        ("--sharding auto", "argument --sharding: auto is about many processes: add --torchrec"),
        ("--torchrec --compile", "argument --compile: not with --torchrec"),
        ("--torchrec --accumulate 2", "argument --accumulate: 2 not with --torchrec"),
        ("--timeout 9", "argument --timeout: 9.0 is about many processes: add --torchrec"),
        ("--publish a --commit-every 9", "argument --publish: a not with --commit-every"),
        ("--storage ssd --commit-every 9", "argument --commit-every: 9 not with --storage ssd"),
        ("--torchrec --nproc 0", "argument --nproc: expected an integer from 1 on, got '0'"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        train.main(arguments.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_errors_before_and_after_the_start(tmp_path: Path) -> None:
    assert "--state-dtype uint8: sgd has no state" in refused(
        *("--torchrec", "--optimizer", "sgd", "--state-dtype", "uint8")
    )
    if not torch.cuda.is_available():
        assert "torch finds no CUDA device" in refused("--torchrec", "--device", "cuda")
    missing = tmp_path / "missing.tsv"
    assert f"error: {missing} does not exist" in refused("--torchrec", str(missing))
    bad = tmp_path / "bad.tsv"
    bad.write_bytes(b"junk\n" * 10)
    message = refused(str(bad), "--torchrec", "--nproc", "1", "--out", str(tmp_path))
    assert message.startswith(f"error: {bad}:1: too few fields")


@pytest.mark.long
def test_a_rank_that_stops_answering_ends_the_job(
    folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")  # until SIGKILL follows SIGTERM
    arguments = [*SMALL, *folders[:2], "--out", str(tmp_path), "--timeout", "20"]
    with pytest.raises(ChildFailedError) as failed:
        run_on_ranks(2, stopped_job, arguments, forked_from="tutorials.dlrm.job.rank_imports")
    rank, failure = failed.value.get_first_failure()
    assert rank == 0
    assert "imed out" in str(failure.message)


@pytest.mark.long
def test_ctrl_c_ends_all_ranks_and_names_the_checkpoint(folders: list[str], tmp_path: Path) -> None:
    arguments = [*SMALL, *folders[:2], "--out", str(tmp_path), "--batch-size", "8"]
    arguments += ["--torchrec", "--nproc", "2", "--checkpoint-every", "1", "--async-checkpoint"]
    started = subprocess.Popen(
        [sys.executable, "-m", "tutorials.dlrm.train", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "checkpoint").exists() and started.poll() is None:
        os.sched_yield()
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    _, told = started.communicate()
    assert started.returncode == 130, told
    saved = checkpoint.read(tmp_path / "checkpoint")
    assert saved is not None
    line = saved["position"][3]
    assert f"interrupted; --resume goes on after line {line} from {tmp_path}" in told


# -- the introduction ------------------------------------------------------------------------------


@pytest.mark.long
def test_the_introduction_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tutorials.torchrec_intro"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "No ids were added" in done.stdout
    assert "step 5: loss" in done.stdout
    assert "with rows of int8" in done.stdout
