"""The programs that move tables from other libraries say what they have said before."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_files import some_rows, write_recis

from tutorials.migrate import (
    from_dynamicemb,
    from_hashing,
    from_oneembedding,
    from_recis,
    from_torchrec,
)

pytestmark = pytest.mark.cpu_only("programs of tutorials, on the CPU")


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The last line that a program has printed."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_from_hashing(capsys: pytest.CaptureFixture[str]) -> None:
    from_hashing.main()
    result = told(capsys)
    assert result["same_answers"]
    assert result["loss_dynamic"] < 0.05 < 0.5 < result["loss_hashed"]
    assert result["rows_dynamic"] == from_hashing.IDS


def test_from_torchrec(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchrec")
    from_torchrec.main()
    result = told(capsys)
    assert result["static"]["difference_after_training_on"] < 1e-6
    assert result["managed"] == {"same_answers": True, "ids": 31}


def test_from_dynamicemb(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchrec")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TorchRec's planner
        from_dynamicemb.main()
    result = told(capsys)
    assert result["files"] == 5  # keys, values, scores, state, options
    assert result["ids"] > 400
    assert result["occurrences"] == 640
    assert result["fresh"] == ["score step"]


def test_from_recis(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from_recis.main([])
    result = told(capsys)
    assert (result["same_rows"], result["ids"]) == (True, 100)
    rows = some_rows(40, 4)
    slots = {"sparse_adamw_exp_avg": rows.values, "sparse_adamw_exp_avg_sq": rows.values**2}
    dense = {"sparse_adamw_step": np.array([3], np.int64)}
    write_recis(tmp_path, "ads", rows, ranks=2, slots=slots, dense=dense)
    from_recis.main(["--checkpoint", str(tmp_path), "--table", "ads"])
    assert told(capsys) == {"ids": 40, "fresh": [], "left_out": []}


def test_from_oneembedding(capsys: pytest.CaptureFixture[str]) -> None:
    from_oneembedding.main([])
    assert told(capsys) == {"ids": 100, "fresh": ["score step"], "same_rows": True}
