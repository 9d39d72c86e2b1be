"""The tutorial of DeepFM: its formula, and a run that goes on after an interruption."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch

from tutorials import deepfm

pytestmark = pytest.mark.cpu_only("the job of a tutorial, on the CPU")


def test_the_factorization_machine_sums_over_pairs() -> None:
    model = deepfm.DeepFM()
    ids = torch.arange(3 * deepfm.CATEGORY_COUNT).view(3, -1)
    dense = torch.randn(3, deepfm.DENSE_COUNT)
    rows = model.rows(ids).double()
    deep = model.deep(torch.cat([rows[..., 1:].flatten(1).float(), dense], 1))[:, 0]
    expected = rows[..., 0].sum(1) + deep
    for i, j in combinations(range(deepfm.CATEGORY_COUNT), 2):
        expected += (rows[:, i, 1:] * rows[:, j, 1:]).sum(1)
    assert torch.allclose(model(dense, ids).double(), expected, atol=1e-5)


@pytest.mark.long
def test_a_resumed_run_ends_as_one_that_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--samples", "20000", "--epochs", "2", "--eager"]
    deepfm.main([*small, "--out", "one"])
    whole = capsys.readouterr().out.splitlines()
    assert len(whole) == 3
    with monkeypatch.context() as patch:
        calls = iter([deepfm.auc_of])
        patch.setattr(deepfm, "auc_of", lambda *of: next(calls)(*of))
        with pytest.raises(StopIteration):
            deepfm.main([*small, "--out", "two"])
    deepfm.main([*small, "--out", "two", "--resume"])
    assert capsys.readouterr().out.splitlines() == whole


@pytest.mark.long
def test_the_default_run_stops_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    deepfm.main([])
    best = capsys.readouterr().out.splitlines()[-1]
    assert float(best.rpartition(" ")[2]) > 0.7
