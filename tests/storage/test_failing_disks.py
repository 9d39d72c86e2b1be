"""Disks that are full or fail under stored rows: what is raised, and what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faulty_training
import pytest
from stored_training import StoredModel

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("stores on disks are the CPU's")


@pytest.fixture
def happened(shimmed_run: Any) -> dict[str, dict[str, Any]]:
    """What became of all cases, in one process."""
    result: dict[str, dict[str, Any]] = shimmed_run.happened
    return result


ALL_CASES = [*faulty_training.CASES, *(f"{case} gpu" for case in faulty_training.ON_A_GPU)]


@pytest.mark.parametrize("case", ALL_CASES)
def test_training_goes_on_as_if_nothing_had_been(
    case: str, happened: dict[str, dict[str, Any]]
) -> None:
    assert happened[case]["losses"] == happened["undisturbed"]["losses"]
    assert happened[case]["values"] == happened["undisturbed"]["values"]
    assert happened[case]["names"] == ["a"]


@pytest.mark.parametrize("case", ["full", "full gpu"])
def test_a_full_disk_is_told_with_bytes_and_the_way_out(
    case: str, happened: dict[str, dict[str, Any]]
) -> None:
    for call in ("error", "again", "snapshot"):
        said = happened[case][call]
        assert "DiskFullError: dynemb: disk full: path " in said
        assert "Nothing has been changed. Free space" in said


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("pread", "reading"),
        ("pwrite", "writing"),
        ("fdatasync", "fdatasync of"),
        ("pread gpu", "reading"),
        ("pwrite gpu", "writing"),
    ],
)
def test_a_failing_disk_ends_the_store(
    case: str, words: str, happened: dict[str, dict[str, Any]]
) -> None:
    said = happened[case]["error"]
    assert words in said
    assert f"/{case}/rows/" in said
    assert "Input/output error" in said
    of_all_calls = said.replace("; table 'users'", "")  # of lookups alone
    assert happened[case]["again"].replace("; table 'users'", "") == of_all_calls
    assert happened[case]["snapshot"] == of_all_calls


@pytest.mark.parametrize(
    ("case", "words"),
    [("index full", "bytes are free"), ("index", "Errno 5"), ("name", "Errno 5")],
)
def test_what_stops_a_snapshot_is_told(
    case: str, words: str, happened: dict[str, dict[str, Any]]
) -> None:
    assert words in happened[case]["error"]
    assert happened[case]["again"] == ""


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ('"version": 1', '"version": 9', r"version 9 of the format, expected 1.*another path"),
        ('"segment_bytes": 65536', '"segment_bytes": 8192', r"segments of 8192 bytes, exp.* 65536"),
        ('"version"', '"virsion"', r"FORMAT is missing or damaged.*another path"),
    ],
)
def test_files_of_another_format_are_refused(
    before: str, after: str, match: str, tmp_path: Path
) -> None:
    model = StoredModel(tmp_path)
    model.train_steps(3)
    model.save("a")
    del model
    path = tmp_path / "FORMAT"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(RuntimeError, match=match):
        StoredModel(tmp_path)
    path.write_text(text)
    assert td.checkpoint.snapshots(tmp_path) == ["a"]
    assert StoredModel(tmp_path).load() == 3
