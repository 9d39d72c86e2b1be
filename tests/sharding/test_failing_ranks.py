"""Where one rank fails or is given something else, all ranks raise, and nothing is half done."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from checkpoint_models import Kind, whole_tables
from checkpoint_steps import (
    How,
    failed_load,
    failed_save,
    given_differently,
    load_model,
    save_model,
)
from ranks import Ranks

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

KINDS = (
    Kind("by_rows", ("row_wise", "row_wise"), "counted"),
    Kind("by_columns", ("column_wise", "column_wise"), "times"),
    Kind("moved", ("row_wise", "table_wise")),
)
ROOM = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "target",
    [
        "torch_dynemb.files.disk.Disk.create",
        "torch_dynemb.files.disk.Disk.write_at",
        "torch_dynemb.files.disk.Disk.sync",
        "torch_dynemb.checkpoint.saving.save.write_group",
    ],
)
def test_a_rank_that_cannot_write(two_ranks: Ranks, tmp_path: Path, target: str) -> None:
    path = tmp_path / "saved"
    saved = two_ranks.run(save_model, KINDS, 0, "adam", str(path), range(2))
    content = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for raised, unchanged in two_ranks.run(failed_save, KINDS, str(path), target, ROOM):
        kind = "OSError" if target.endswith("write_group") else "DiskFullError"  # which says more
        assert raised.startswith(f"{kind}: [Errno 28] No space left on device")
        assert unchanged
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    loaded = two_ranks.run(load_model, KINDS, 1, "adam", str(path), How())
    before, after = (whole_tables([of.shards for of in found]) for found in (saved, loaded))
    for name, table in before.items():
        assert (table.ids == after[name].ids).all()
        assert (table.values["rows"] == after[name].values["rows"]).all()


@pytest.mark.parametrize(
    "target",
    [
        "torch_dynemb.checkpoint.loading.load.plan_of",
        "torch_dynemb.checkpoint.loading.part.SavedRows.whole",
        "torch_dynemb.checkpoint.reading.saved_rows.SavedRows.ranges",
        "torch_dynemb.rows.loader.recount",
    ],
)
def test_a_rank_that_cannot_read(two_ranks: Ranks, tmp_path: Path, target: str) -> None:
    path = str(tmp_path / "saved")
    two_ranks.run(save_model, KINDS, 0, "adam", path, range(2))
    error = OSError(errno.EIO, "Input/output error")
    for filled in (True, False):
        found = two_ranks.run(failed_load, KINDS, path, target, error, filled)
        for raised, unchanged, sizes in found:
            assert raised == "OSError: [Errno 5] Input/output error"
            assert unchanged
            assert (set(sizes) == {0}) == (not filled)


def test_ranks_that_are_given_different_things(two_ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    first, second = two_ranks.run(given_differently, KINDS, path)
    assert first == second
    same = "the ranks share the tables, so give all of them the same"
    assert first == {
        "path": f"ValueError: checkpoint.save: path differs between ranks: '{path} of 0' on rank "
        f"0; '{path} of 1' on rank 1: {same}",
        "asynchronous": "ValueError: checkpoint.save: asynchronous differs between ranks: False on "
        f"rank 0; True on rank 1: {same}",
        "no path": "TypeError: checkpoint.save: path is 5, expected a str or a Path",
        "no model": "TypeError: checkpoint.save: model is {}, expected a torch.nn.Module",
        "no tables": "ValueError: checkpoint: table 'bags.by_rows' has no ids of slots 1 to 2 on "
        "ranks [0]: all ranks that share the table call it, together",
        "path of load": f"FileNotFoundError: {path}- is not a checkpoint: it does not exist",
        "strict": "ValueError: checkpoint.load: strict differs between ranks: True on rank 0; "
        f"False on rank 1: {same}",
        "no tables of load": first["no tables"],
        "optimizer_state": "ValueError: checkpoint.load: optimizer_state differs between ranks: "
        f"True on rank 0; False on rank 1: {same}",
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
