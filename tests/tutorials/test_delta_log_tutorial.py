"""The tutorial with a delta log in SQLite."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from torch_dynemb.delta_log import DeltaSink
from tutorials.delta_log import train_and_serve
from tutorials.delta_log.sqlite_sink import SQLiteSink

pytestmark = pytest.mark.cpu_only("the job of a tutorial, on the CPU")


def test_who_follows_answers_as_the_model_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_and_serve.main(["--out", str(tmp_path / "out"), "--commits", "3"])
    result = json.loads(capsys.readouterr().out)
    assert len(result["behind_before_commits"]) == 3
    assert min(result["behind_before_commits"]) > 0.01
    assert result["apart"] < 1e-5
    assert result["database_bytes"] > 0


def test_the_sink_keeps_batches(tmp_path: Path) -> None:
    sink = SQLiteSink(tmp_path / "batches.sqlite3")
    assert isinstance(sink, DeltaSink)
    for number in range(1, 6):
        sink.append(memoryview(bytes([number])), number)
    with pytest.raises(sqlite3.IntegrityError):
        sink.append(memoryview(b"another writer"), 5)
    assert list(sink.read(4)) == [b"\x04", b"\x05"]
    sink.truncate(2)
    sink.drop_after(4)
    assert list(SQLiteSink(sink.path).read(0)) == [b"\x02", b"\x03", b"\x04"]
