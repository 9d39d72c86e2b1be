"""The tutorial with OneEmbedding's names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutorials.oneembedding import train

pytestmark = pytest.mark.cpu_only("the job of a tutorial, on the CPU")


def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> dict:
    small = ["--samples", "2000", "--batch-size", "128", "--embedding-dim", "4"]
    places = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "data")]
    train.main([*small, *places, *arguments])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.long
def test_it_trains_saves_and_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, tmp_path, "--lr", "0.02")
    assert 0.55 < result["auc"] < result["best_auc"] < 0.9
    assert result["loaded_auc"] == result["auc"]
    assert result["ids_read"] == result["ids"] > 2500
    assert [path.name for path in (tmp_path / "out/snapshots").iterdir()] == ["trained"]
    on_ssd = run(capsys, tmp_path, "--lr", "0.02", "--store", "cached_ssd", "--cache-mb", "1")
    assert (on_ssd["auc"], on_ssd["loaded_auc"]) == (result["auc"], result["auc"])
    other = ["--optimizer", "ftrl", "--store", "cached_host_mem", "--capacity", "50"]
    bounded = run(capsys, tmp_path, *other)
    assert bounded["loaded_auc"] == bounded["auc"] != result["auc"]
    assert bounded["ids_read"] == bounded["ids"] <= 26 * 50
