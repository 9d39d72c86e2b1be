"""The DLRM tutorial from the command line to its last line of output."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_dynemb as td
from tutorials.dlrm import options, train
from tutorials.dlrm.data import CriteoReader
from tutorials.dlrm.job import checkpoint, serving
from tutorials.dlrm.job.generate import format_lines
from tutorials.dlrm.job.planted import PlantedConfig, PlantedModel
from tutorials.dlrm.model import DLRM, DynamicRows

pytestmark = [
    pytest.mark.cpu_only("the job of a tutorial, on the CPU"),
    pytest.mark.usefixtures("same_threads_afterwards", "no_report"),
]

ROOT = Path(__file__).resolve().parents[2]
KEYS = [
    *("auc", "best_auc", "baseline_auc", "samples", "samples_per_s"),
    *("ids", "table_bytes", "optimizer", "row_dtype", "state_dtype", "rounding", "accumulate"),
    *("capacity", "eviction", "admission"),
    *("evicted", "rejected", "not_admitted", "device", "compiled", "storage"),
]
SMALL = ["--batch-size", "256", "--embedding-dim", "4", "--threads", "1", "--lr", "0.05"]


@pytest.fixture(scope="session")
def text() -> bytes:
    """5000 lines of a model that is quickly learnt: few ids."""
    config = PlantedConfig(samples=5000, cardinality_divisor=100_000, turnover=0)
    return format_lines(PlantedModel(config).draw(0, config.samples))


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict:
    capsys.readouterr()
    train.main([*map(str, arguments), *SMALL])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def refused(*arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as caught:
        train.main([*map(str, arguments), *SMALL])
    assert isinstance(caught.value.code, str)  # goes to stderr, with exit status 1
    return caught.value.code


@pytest.mark.long
def test_files_from_the_command_line(tmp_path, text):
    """Several files, one of them compressed, with a bad line to skip."""
    lines = text.splitlines(keepends=True)
    plain, compressed = tmp_path / "0.tsv", tmp_path / "1.tsv.gz"
    plain.write_bytes(b"".join([*lines[:1000], b"junk\n", *lines[1000:2000]]))
    compressed.write_bytes(gzip.compress(b"".join(lines[2000:])))
    out = tmp_path / "out"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tutorials.dlrm.train", plain, compressed, "--out", out),
            *("--on-bad-line", "skip", "--checkpoint-every", "5", "--log-every", "2", *SMALL),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == KEYS
    assert result["samples"] == 4500
    assert result["best_auc"] is None
    assert 0.6 < result["auc"] < 0.9
    assert 0.6 < result["baseline_auc"] < 0.9
    assert result["samples_per_s"] > 0
    assert result["ids"] > 26
    assert result["table_bytes"] >= result["ids"] * 4 * (4 + 1)
    assert result["device"] == "cpu"
    assert result["compiled"] is False
    assert f"skipped 1 of 5001 lines, the first: {plain}:1001: too few fields" in done.stderr
    for shown in ("samples/s", "loss=", "auc=", "ids=", "tables=", "peak=", "skipped=1"):
        assert shown in done.stderr
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert sorted(p.name for p in out.iterdir()) == ["checkpoint", "report.html", "training.png"]
    saved = checkpoint.read(out / "checkpoint")
    assert saved is not None
    assert saved["position"][3] == 4501


@pytest.mark.long
def test_generated_data_compiled_and_not(tmp_path, capsys):
    arguments = ["--samples", "6000", "--samples-folder", tmp_path / "samples", "--no-baseline"]
    eager = run(capsys, *arguments, "--out", tmp_path / "eager")
    # The last batch is smaller than the others: it has to fit into the same graph.
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = run(capsys, *arguments, "--out", tmp_path / "compiled", "--compile")
    assert list(eager) == list(compiled) == KEYS
    assert compiled["compiled"] is True
    assert compiled["auc"] == pytest.approx(eager["auc"], abs=0.01)
    assert compiled["best_auc"] == eager["best_auc"] > eager["auc"]
    for result in (eager, compiled):
        assert result["baseline_auc"] is None
        assert result["samples"] == 5400
    assert compiled["ids"] == eager["ids"]
    assert compiled["table_bytes"] == eager["table_bytes"]


def test_frozen_models_with_quantized_rows_are_evaluated(tmp_path, capsys):
    arguments = ["--samples", "3000", "--samples-folder", tmp_path / "samples", "--no-baseline"]
    result = run(capsys, *arguments, "--out", tmp_path, "--quantize", "int8,int4")
    assert list(result) == [*KEYS, "quantized"]
    served = result["quantized"]
    assert list(served) == ["unchanged", "int8", "int4"]
    assert served["unchanged"]["auc"] == result["auc"]
    for kind, row_bytes in (("unchanged", 16), ("int8", 12), ("int4", 6)):
        assert served[kind]["auc"] == pytest.approx(result["auc"], abs=0.01)
        assert served[kind]["row_bytes"] == row_bytes
        assert served[kind]["bytes_per_id"] > row_bytes + 4
    assert len({of_kind["auc"] for of_kind in served.values()}) > 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--quantize", "int3"], "expected some of int8, int4, fp8, fp16, bf16 between commas"),
        (["--quantize", "int8,int8"], "each once, got 'int8,int8'"),
        (["--quantize", "int8", "--torchrec"], "--quantize: not with --torchrec"),
        (["--export", "clicks", "--torchrec"], "--export: clicks not with --torchrec: export in"),
    ],
)
def test_frozen_models_that_cannot_be(capsys, given, message):
    with pytest.raises(SystemExit):
        options.parse(given)
    assert message in capsys.readouterr().err


def test_packages_that_are_there_are_refused_before_training(tmp_path, text):
    samples, packages = tmp_path / "samples.tsv", tmp_path / "packages"
    samples.write_bytes(text)
    (packages / "int8").mkdir(parents=True)
    arguments = [samples, "--out", tmp_path / "out", "--export", packages]
    message = refused(*arguments, "--quantize", "int4,int8")
    assert message.startswith(f"error: --export {packages}: {packages / 'int8'} is there: choose")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in packages.iterdir()] == ["int8"]


@pytest.mark.long
def test_packages_give_what_the_model_gives(tmp_path, capsys, text):
    samples, packages = tmp_path / "samples.tsv", tmp_path / "packages"
    samples.write_bytes(text)
    arguments = [samples, "--no-baseline", "--out", tmp_path / "out", "--export", packages]
    result = run(capsys, *arguments, "--quantize", "int8")
    assert list(result) == [*KEYS, "quantized", "exported"]
    assert list(result["exported"]) == ["unchanged", "int8"]
    for kind, exported in result["exported"].items():
        assert exported["path"] == str(packages / kind)
        assert exported["samples"] == 500
        assert exported["largest_difference"] <= 1e-4
        assert exported["bytes"] == sum(of.stat().st_size for of in (packages / kind).iterdir())
        with td.serving.load(packages / kind) as served:
            assert served.version == 18  # steps
            assert sum(table.ids for table in served.tables.values()) == result["ids"]
            one = served.run(torch.zeros(1, 26), torch.zeros(26, 1, dtype=torch.int64))
            assert one.shape == (1,)


def test_packages_that_give_something_else_are_refused(tmp_path, monkeypatch):
    """The package is made manually: compiled code would return the same."""
    frozen = td.freeze(DLRM(DynamicRows(4, td.RowWiseAdagrad(0.1)), 4))

    class Wrong:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def run(self, dense, ids):
            return frozen(dense, ids) + torch.tensor([0.0, float("nan")])

    monkeypatch.setattr(td.serving, "export", lambda *_, **__: None)
    monkeypatch.setattr(td.serving, "load", lambda _: Wrong())
    samples = tmp_path / "samples.tsv"
    samples.write_bytes(b"1" + b"\t" * 39 + b"\n" + b"0" + b"\t" * 39 + b"\n")
    with pytest.raises(ValueError, match="log-odds that are nan from those of the model"):
        serving.export_package(frozen, tmp_path, 1, CriteoReader([samples], 2))


@pytest.mark.long
def test_seed_decides_everything(tmp_path, capsys):
    arguments = ["--samples", "1500", "--samples-folder", tmp_path / "samples"]
    results = []
    for i, seed in enumerate((3, 3, 4)):
        result = run(capsys, *arguments, "--out", tmp_path / str(i), "--seed", str(seed))
        del result["samples_per_s"]
        results.append(result)
    assert results[0] == results[1]
    assert results[0]["auc"] != results[2]["auc"]
    assert results[0]["best_auc"] != results[2]["best_auc"]


def test_samples_limits_the_lines_of_files(tmp_path, capsys, text):
    path = tmp_path / "a.tsv"
    path.write_bytes(text)
    arguments = ["--samples", "600", "--held-out", "0.5", "--no-baseline"]
    assert run(capsys, path, *arguments, "--out", tmp_path)["samples"] == 300


def test_one_label_only_has_no_auc(tmp_path, capsys, text):
    path = tmp_path / "a.tsv"
    path.write_bytes(b"".join(b"0" + line[1:] for line in text.splitlines(keepends=True)[:300]))
    result = run(capsys, path, "--out", tmp_path)
    assert result["auc"] is None
    assert result["baseline_auc"] is None


def test_bad_input_is_refused(tmp_path, text):
    out = ["--out", tmp_path / "out"]
    bad = tmp_path / "bad.tsv"
    bad.write_bytes(text[:5000] + b"\x00\n")
    line = text[:5000].count(b"\n") + 1
    assert refused(bad, *out).startswith(f"error: {bad}:{line}: ")
    empty = tmp_path / "empty.tsv"
    empty.touch()
    assert refused(empty, *out) == (
        f"error: {empty}: the file is empty (--on-bad-line skip leaves bad lines out)"
    )
    assert refused(tmp_path / "no.tsv", *out).startswith(f"error: {tmp_path / 'no.tsv'} does not")
    skip = ["--on-bad-line", "skip"]
    assert "0 lines of data; give at least 2" in refused(empty, *out, *skip)
    junk = tmp_path / "junk.tsv"
    junk.write_bytes(b"\x00\n\xff\n\x80")
    message = refused(junk, *out, *skip)
    assert f"the 2 lines before the held-out ones are bad, the first: {junk}:1: too" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(tmp_path):
    message = refused("--device", "cuda", "--out", tmp_path)
    assert message == "error: --device cuda: torch finds no CUDA device; use --device cpu"


def test_resume_under_other_settings_is_refused(tmp_path, capsys, text):
    path = tmp_path / "a.tsv"
    path.write_bytes(text)
    arguments = [path, "--samples", "600", "--no-baseline", "--out", tmp_path]
    first = run(capsys, *arguments)
    again = run(capsys, *arguments, "--resume")
    assert again["auc"] == first["auc"]
    message = refused(*arguments, "--resume", "--seed", "1", "--checkpoint-every", "7")
    assert "--checkpoint-every: 200 in the checkpoint, 7 now" in message
    assert "--seed: 0 in the checkpoint, 1 now" in message
    with path.open("ab") as file:
        file.write(text[:1000])
    assert re.search(r"file sizes: \[\d+\] in the checkpoint", refused(*arguments, "--resume"))


def test_resume_without_a_checkpoint_starts(tmp_path, capsys, text):
    path = tmp_path / "a.tsv"
    path.write_bytes(text)
    arguments = [path, "--samples", "600", "--no-baseline", "--out", tmp_path, "--resume"]
    train.main([*map(str, arguments), *SMALL])
    assert "no checkpoint at" in capsys.readouterr().err
