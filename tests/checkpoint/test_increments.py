"""``save(since=)`` and ``merge``: a checkpoint and its increments are a whole checkpoint."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import pytest
import torch
from changing_tables import dense_files, happen, train
from checkpoint_content import (
    ColumnShards,
    agrees,
    group_content,
    same,
    saved_content,
    trained_model,
)
from faulty_disk import FullDisk
from torch import nn

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.__main__ import main

pytestmark = pytest.mark.any_device

SAVE = sys.modules["torch_dynemb.checkpoint.saving.save"]
DIM = 4


def test_a_checkpoint_and_its_increments_are_what_a_save_would_have_saved(tmp_path: Path) -> None:
    model = trained_model(ids=300)
    tables: Any = model["tables"]
    checkpoint.record_changes(model)
    checkpoint.save(tmp_path / "0", model, state={"epoch": 0})
    chain = [tmp_path / "0"]
    for step in range(1, 7):
        train(tables, step)
        happen(tables.group, step)
        with torch.no_grad():
            model["top"].weight += step  # type: ignore[operator]
        path = tmp_path / str(step)
        checkpoint.save(path, model, since=chain[-1], state={"epoch": step})
        chain.append(path)
        out = tmp_path / f"merged {step}"
        checkpoint.merge(chain, out)
        merged = saved_content(out)
        for number, name in enumerate(tables.group.names):
            saved = merged[f"tables.{name}"]
            assert saved.ids.numel() == tables.group.size(number)
            if saved.ids.numel() > 0:
                assert agrees(saved, group_content(tables.group, number)), name
    checkpoint.save(tmp_path / "whole", model, state={"epoch": 6})
    for parts in (1, 3):
        out = tmp_path / f"merged for {parts}"
        checkpoint.merge(chain, out, parts=parts)
        assert same(saved_content(out), saved_content(tmp_path / "whole"))
        assert same(dense_files(out), dense_files(tmp_path / "whole"))
    with checkpoint.open(chain[1]) as delta, checkpoint.open(chain[0]) as base:
        assert (delta.kind, delta.parent) == ("delta", base.uuid)
        users = delta.tables["tables.users"]
        assert users.ids < base.tables["tables.users"].ids
        gone = torch.cat(list(users.removed_batches(7)))
        assert gone.numel() == users.removed > 0


def test_an_increment_has_little_beside_the_rows_that_changed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = td.DynamicEmbeddingBag(32, mode="sum", name="bag", optimizer=td.Adam(lr=0.1))
    model(torch.arange(5000)[:, None]).sum().backward()
    model.optimizer.step()
    checkpoint.record_changes(model)
    checkpoint.save(tmp_path / "base", model)
    ids = torch.randperm(5000)[:2000]
    model(ids[:, None]).sum().backward()
    model.optimizer.step()
    checkpoint.save(tmp_path / "delta", model, since=tmp_path / "base")
    with checkpoint.open(tmp_path / "delta") as delta:
        [table] = delta.tables.values()
        told = torch.cat(list(table.id_batches(999)))
        assert torch.equal(told.cpu().sort().values, ids.cpu().sort().values)
        size = sum(file.bytes for file in delta.manifest.files())
        assert size < 1.1 * 2000 * table.row_bytes


def test_training_goes_on_from_what_was_merged(tmp_path: Path) -> None:
    model = trained_model(ids=200)
    checkpoint.record_changes(model)
    checkpoint.save(tmp_path / "base", model)
    train(model["tables"], 1)  # type: ignore[arg-type]
    checkpoint.save(tmp_path / "delta", model, since=tmp_path / "base")
    checkpoint.merge([tmp_path / "base", tmp_path / "delta"], tmp_path / "merged")
    other = trained_model(steps=1, ids=20)
    checkpoint.record_changes(other)
    checkpoint.load(tmp_path / "merged", other)
    for of in (model, other):
        train(of["tables"], 2)  # type: ignore[arg-type]
    checkpoint.save(tmp_path / "next", other, since=tmp_path / "merged")
    with checkpoint.open(tmp_path / "next") as delta:
        assert 0 < delta.tables["tables.users"].ids <= 100
    checkpoint.merge([tmp_path / "merged", tmp_path / "next"], tmp_path / "after")
    checkpoint.save(tmp_path / "whole", model)
    assert same(saved_content(tmp_path / "after"), saved_content(tmp_path / "whole"))


def test_columns_that_changed_alone_are_saved_with_the_others(tmp_path: Path) -> None:
    model = ColumnShards([4, 8], td.RowWiseAdagrad(lr=0.1))
    model.train_on(torch.arange(50))
    checkpoint.record_changes(model)
    checkpoint.save(tmp_path / "base", model)
    model.train_on(torch.tensor([3, 4, 60]))
    first: Any = model.shards[0]
    first(torch.tensor([9])).sum().backward()
    first.optimizer.step()
    for shard in model.shards:
        shard.group.erase(0, torch.tensor([5]))  # type: ignore[union-attr, operator]
    checkpoint.save(tmp_path / "delta", model, since=tmp_path / "base")
    with checkpoint.open(tmp_path / "delta") as delta:
        [table] = delta.tables.values()
        assert torch.cat(list(table.id_batches(9))).tolist() == [3, 4, 9, 60]
        assert torch.cat(list(table.removed_batches(9))).tolist() == [5]
    checkpoint.merge([tmp_path / "base", tmp_path / "delta"], tmp_path / "merged")
    checkpoint.save(tmp_path / "whole", model)
    assert same(saved_content(tmp_path / "merged"), saved_content(tmp_path / "whole"))


def small(optimizer: td.OptimizerConfig | None = None) -> td.DynamicEmbedding:
    torch.manual_seed(2)
    model = td.DynamicEmbedding(DIM, name="ids", optimizer=optimizer or td.SGD(lr=0.1))
    model(torch.arange(20)).sum().backward()
    model.optimizer.step()
    return model


def test_what_could_not_be_written_is_written_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    checkpoint.record_changes(model)
    checkpoint.save(tmp_path / "base", model)
    model(torch.tensor([3, 21])).sum().backward()
    monkeypatch.setattr(SAVE, "_DISK", FullDisk("write_at", 2))
    with pytest.raises(OSError, match="bytes are free") as raised:
        checkpoint.save(tmp_path / "delta", model, since=tmp_path / "base")
    monkeypatch.undo()
    assert raised.value.errno == errno.ENOSPC
    checkpoint.save(tmp_path / "delta", model, since=tmp_path / "base")
    with checkpoint.open(tmp_path / "delta") as delta:
        assert delta.tables["embedding"].ids == 2


def test_a_whole_save_in_the_background_is_gone_on_from(tmp_path: Path) -> None:
    model = small()
    checkpoint.record_changes(model)
    handle = checkpoint.save(tmp_path / "base", model, asynchronous=True)
    model(torch.tensor([3, 21])).sum().backward()
    model.optimizer.step()
    handle.wait()
    checkpoint.save(tmp_path / "delta", model, since=tmp_path / "base")
    with checkpoint.open(tmp_path / "delta") as delta:
        assert delta.tables["embedding"].ids == 2


def test_saves_that_cannot_go_on_from_another_one_are_refused(tmp_path: Path) -> None:
    model = small()
    checkpoint.save(tmp_path / "early", model)
    with pytest.raises(RuntimeError, match=r"not recorded: call .*record_changes\(model\)"):
        checkpoint.save(tmp_path / "delta", model, since=tmp_path / "early")
    checkpoint.record_changes(model)
    with pytest.raises(RuntimeError, match="known since no checkpoint"):
        checkpoint.save(tmp_path / "delta", model, since=tmp_path / "early")
    checkpoint.save(tmp_path / "base", model)
    with pytest.raises(RuntimeError, match="save without since"):
        checkpoint.save(tmp_path / "delta", model, since=tmp_path / "early")
    with pytest.raises(ValueError, match="which the increment would replace"):
        checkpoint.save(tmp_path / "base", model, since=tmp_path / "base")
    with pytest.raises(ValueError, match="asynchronous=True with since= is not built"):
        checkpoint.save(tmp_path / "d", model, since=tmp_path / "base", asynchronous=True)
    with pytest.raises(FileNotFoundError, match="is not a checkpoint"):
        checkpoint.save(tmp_path / "delta", model, since=tmp_path / "none")
    with pytest.raises(TypeError, match="path"):
        checkpoint.save(tmp_path / "delta", model, since=3)  # type: ignore[arg-type]
    assert not (tmp_path / "delta").exists()
    checkpoint.save(tmp_path / "delta", model, since=tmp_path / "base")
    with pytest.raises(RuntimeError, match="known since the checkpoint with uuid"):
        checkpoint.save(tmp_path / "again", model, since=tmp_path / "base")
    other = small(td.Adam(lr=0.1))
    checkpoint.record_changes(other)
    checkpoint.load(tmp_path / "base", other, optimizer_state=False)
    with pytest.raises(RuntimeError, match="known since no checkpoint"):
        checkpoint.save(tmp_path / "again", other, since=tmp_path / "base")


def test_what_is_asked_of_a_model_without_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="has no tables"):
        checkpoint.record_changes(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model is 3"):
        checkpoint.record_changes(3)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints base, one and two, each of which goes on from the one before."""
    folder = tmp_path_factory.mktemp("chain")
    model = small()
    checkpoint.record_changes(model)
    checkpoint.save(folder / "base", model)
    for number, name in enumerate(("one", "two")):
        before = folder / ("base", "one")[number]
        model(torch.tensor([number, 30 + number])).sum().backward()
        model.optimizer.step()
        checkpoint.save(folder / name, model, since=before)
    return folder


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda folder, out: checkpoint.merge([folder / "base", folder / "two"], out),
            "the order",
        ),
        (lambda folder, out: checkpoint.merge([folder / "one", folder / "two"], out), "increment"),
        (lambda folder, out: checkpoint.merge([folder / "base"] * 2, out), "it is a whole one"),
        (lambda folder, out: checkpoint.reshard(folder / "one", out, parts=2), "an increment of"),
        (lambda folder, out: checkpoint.export(folder / "one", out, file_format="npz"), "merge"),
        (lambda folder, out: checkpoint.load(folder / "one", small()), "checkpoint merge"),
    ],
)
def test_increments_are_no_whole_checkpoints(
    chain: Path, tmp_path: Path, call: Callable[[Path, Path], object], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        call(chain, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_damaged_batches_are_refused_by_their_name(chain: Path, tmp_path: Path) -> None:
    [batch] = chain.glob("one/*/r000-of-001/*.delta")
    size, copy = batch.stat().st_size, tmp_path / "one"
    named = copy / batch.relative_to(chain / "one")
    for at in (0, 30, 79, 90, 120, 300, size // 2, size - 100, size - 20, size - 1):
        damage.copied(chain / "one", copy)
        damage.flip(at, at % 7)(named)
        with pytest.raises(checkpoint.DamagedFileError, match=re.escape(f"{named}: ")):
            checkpoint.merge([chain / "base", copy], tmp_path / "out")
        assert not (tmp_path / "out").exists()
    damage.copied(chain / "one", copy)
    named.unlink()  # a link
    named.write_bytes(next(chain.glob("two/*/r000-of-001/*.delta")).read_bytes())
    with pytest.raises(checkpoint.DamagedFileError, match=re.escape(f"{named}: ")):
        checkpoint.merge([chain / "base", copy], tmp_path / "out")
    named.unlink()
    with pytest.raises(checkpoint.DamagedFileError, match="is missing"):
        checkpoint.open(copy)


def test_wrong_arguments_of_merge_are_refused(chain: Path, tmp_path: Path) -> None:
    for paths in (str(chain / "base"), [], 3):
        with pytest.raises(TypeError, match="expected a list of paths"):
            checkpoint.merge(paths, tmp_path / "out")  # type: ignore[arg-type]
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        checkpoint.merge([chain / "base", chain / "one"], tmp_path / "out")
    with pytest.raises(ValueError, match="merge: parts"):
        checkpoint.merge([chain / "base", chain / "one"], tmp_path / "other", parts=0)


def test_the_commands(chain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(chain / name) for name in ("base", "one", "two")]
    assert main(["checkpoint", "merge", *paths, str(tmp_path / "out")]) == 0
    assert main(["checkpoint", "inspect", paths[1]]) == 0
    assert "an increment of the checkpoint" in capsys.readouterr().out
    assert main(["checkpoint", "verify", paths[2]]) == 0
    assert main(["checkpoint", "merge", paths[0], paths[2], str(tmp_path / "no")]) == 1
    assert "in the order in which they were saved" in capsys.readouterr().err
    loaded = small()
    report = checkpoint.load(tmp_path / "out", loaded)
    assert report.tables["embedding"].ids == 22
