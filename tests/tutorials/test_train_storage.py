"""Rows in files in the DLRM tutorial: options, results, what is reported, batches read ahead."""

from __future__ import annotations

import gc
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tutorials.dlrm import loop, options, train
from tutorials.dlrm.data import CriteoReader
from tutorials.dlrm.sweeps import cache_size, job_runs

pytestmark = [
    pytest.mark.cpu_only("the job of a tutorial, on the CPU"),
    pytest.mark.usefixtures("same_threads_afterwards", "no_report"),
]

SMALL = [
    *("--samples", "3000", "--batch-size", "256", "--embedding-dim", "16", "--threads", "1"),
    *("--zipf", "0.7", "--no-baseline", "--log-every", "2", "--progress-interval", "0"),
]
FILES = ["--storage", "ssd", "--cache", "4000 rows", "--disk", "512MB"]
# what differs between a run in memory and one with files
PLACE = ("storage", "table_bytes", "samples_per_s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("storage")


def run(
    folder: Path, out: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    train.main([*SMALL, "--samples-folder", str(folder / "samples"), "--out", str(out), *more])
    shown = capsys.readouterr()
    return json.loads(shown.out.splitlines()[-1]), shown.err


def same_everywhere(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in PLACE}


# -- options ---------------------------------------------------------------------------------------


def test_defaults():
    opts = options.parse([])
    assert (opts.storage, opts.cache, opts.storage_path, opts.disk) == ("memory", None, None, None)
    opts = options.parse(["--storage", "ssd", "--out", "here"])
    assert (opts.cache, opts.storage_path, opts.disk) == ("25%", Path("here/rows"), None)
    opts = options.parse(["--storage", "ssd", "--storage-path", "there", "--cache", "4GB"])
    assert (opts.cache, opts.storage_path) == ("4GB", Path("there"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cache 25%", "--cache: 25% is about rows in files: add --storage ssd"),
        ("--disk 1GB", "--disk: 1GB is about rows in files: add --storage ssd"),
        ("--storage-path here", "--storage-path: here is about rows in files: add --storage ssd"),
        ("--storage disk", "--storage: invalid choice: 'disk'"),
        ("--storage ssd --cache runs/data", "--cache: SSDStore: cache is 'runs/data', expected"),
        ("--storage ssd --cache 0%", "--cache: SSDStore: cache is '0%', expected a fraction above"),
        ("--storage ssd --disk much", "--disk: SSDStore: disk is 'much'"),
        ("--storage ssd --disk 1MB", "--disk: SSDStore: disk is '1MB', expected at least 4"),
        ("--storage ssd --device cuda", "--storage: ssd not with --device cuda"),
        ("--storage ssd --async-checkpoint", "--async-checkpoint: not with --storage ssd"),
        ("--zipf 0", "--zipf: expected a number above 0, got '0'"),
        ("--cardinality-divisor .5", "--cardinality-divisor: expected a number from 1 on"),
    ],
)
def test_contradictions_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        options.parse(arguments.split())
    assert message in " ".join(capsys.readouterr().err.split())


# -- from the command line to the result -----------------------------------------------------------


@pytest.mark.long_cases("more0")
@pytest.mark.parametrize("more", [[], ["--accumulate", "2", "--optimizer", "adam"]])
def test_results_are_those_of_a_run_in_memory(more, folder, tmp_path, capsys):
    in_memory, _ = run(folder, tmp_path / "memory", capsys, *more)
    assert in_memory["storage"] is None
    in_files, bar = run(folder, tmp_path / "files", capsys, *FILES, *more)
    assert same_everywhere(in_files) == same_everywhere(in_memory)
    assert in_files["table_bytes"] < in_memory["table_bytes"]
    files = in_files["storage"]
    assert (files["kind"], files["cache"]) == ("ssd", "4000 rows")
    assert files["hits"] > 0
    assert files["misses"] > 0
    assert files["prefetched"] > 0
    assert files["stored"] > 4000  # what the cache cannot hold
    assert files["stored"] <= in_files["ids"]
    assert files["read_mb_per_s"] > 0
    assert files["written_mb_per_s"] > 0
    assert 0 < files["disk_bytes"] <= 512_000_000
    assert files["peak_bytes"] > in_files["table_bytes"]
    assert all(f"{name}=" in bar for name in ("hits", "misses", "read", "written"))
    assert (tmp_path / "memory" / "checkpoint").is_dir()
    names = sorted(path.name for path in (tmp_path / "files").iterdir())
    assert names == ["checkpoint", "rows"]


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(FILES, FILES), (FILES, []), ([], FILES)])
def test_a_run_goes_on_from_memory_and_from_files(
    before, after, folder, tmp_path, capsys, ctrl_c_after_a_save
):
    whole, _ = run(folder, tmp_path / "whole", capsys)
    out = tmp_path / "interrupted"
    with ctrl_c_after_a_save():
        run(folder, out, capsys, "--checkpoint-every", "4", *before)
    gc.collect()  # the process goes on here: the tables are in the exception's frames
    resumed, said = run(folder, out, capsys, "--checkpoint-every", "4", "--resume", *after)
    assert "resuming after line 1024" in said
    assert same_everywhere(resumed) == same_everywhere(whole)
    assert (resumed["storage"] is None) == (after == [])


def test_files_of_other_rows_are_left_alone(folder, tmp_path, capsys):
    run(folder, tmp_path, capsys, *FILES)
    with pytest.raises(SystemExit, match=f"^error: --storage-path {tmp_path}/rows: .* path"):
        run(folder, tmp_path, capsys, *FILES, "--optimizer", "adam")
    run(folder, tmp_path, capsys, *FILES)  # of equal rows, they are replaced


def test_the_auc_on_the_way_is_that_of_a_run_in_memory(folder):
    curves = []
    for more in ([], FILES):
        samples = ["--samples-folder", str(folder / "samples")]
        opts = options.parse([*SMALL, *samples, "--out", str(folder / "curve"), *more])
        data = train.open_data(opts, quiet=True)
        progress = train.make_pass(opts, train.make_rows(opts, data), compiled=False)
        auc = train.train(opts, data, progress, progress.optimizers).auc
        curves.append(([(p.samples, p.loss, p.auc, p.ids) for p in progress.points], auc))
    assert curves[0] == curves[1]


def test_a_batch_read_ahead_moves_no_position(folder, capsys):
    run(folder, folder / "any", capsys)
    (path,) = (folder / "samples").glob("*/samples.tsv")

    def reader() -> CriteoReader:
        return CriteoReader([path], 700, stop_line=3000)

    plain = list(loop._steps(reader(), ahead=False))
    assert [following for _, following, _ in plain] == [None] * 5
    ahead = list(loop._steps(reader(), ahead=True))
    assert [position for _, _, position in ahead] == [position for _, _, position in plain]
    for (now, following, _), (then, _, _) in itertools.pairwise(ahead):
        assert following is then
        assert now is not then
    assert ahead[-1][1] is None
    assert list(loop._steps(CriteoReader([path], 7, stop_line=0), ahead=True)) == []


# -- the time of a step against the size of the cache ----------------------------------------------


def test_caches_of_several_sizes_are_compared(tmp_path, monkeypatch):
    made = []
    aucs = {"--cache 10%": 0.7}

    def fake(opts: list[str]) -> dict[str, Any]:
        made.append(" ".join(opts))
        auc = next((auc for cache, auc in aucs.items() if cache in made[-1]), 0.7)
        storage = {"misses": 5, "prefetched": 15, "hits": 95} if "--storage" in opts else None
        return {"auc": auc, "samples_per_s": 20480.0, "storage": storage}

    monkeypatch.setattr(job_runs, "_run", fake)
    out = ["--out", str(tmp_path), "--shares", "0.1", "1", "--rounds", "2"]
    cache_size.main([*out, "--seed", "5"])
    job = "--seed 5 --no-baseline --batch-size 2048"
    caches = [f"--storage ssd --cache {size} {job}" for size in ("10%", "100%")]
    assert made == 2 * [job, *caches]  # in turn
    assert (tmp_path / "cache_size.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    made.clear()
    cache_size.main([*out, "--seed", "5"])
    assert made == []
    aucs["--cache 10%"] = 0.71
    with pytest.raises(SystemExit, match="the AUC with --storage ssd --cache 10% is not that in"):
        cache_size.main([*out, "--seed", "6"])
