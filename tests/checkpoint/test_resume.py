"""``resume``: the base of a log and its commits are the trainer at the last commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import pytest
import torch
from changing_tables import dense_files, happen, train
from checkpoint_content import ColumnShards, same, saved_content, trained_model
from memory_sink import MemorySink
from torch import nn

import torch_dynemb as td
from torch_dynemb import checkpoint, delta_log, errors
from torch_dynemb.delta_log import DeltaLog, resume
from torch_dynemb.delta_log.new_base import Retention
from torch_dynemb.table.scores import stored_scores

pytestmark = pytest.mark.any_device


@pytest.fixture(autouse=True)
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are compared read the same time, however long a test takes."""
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)


def assert_equal(one: nn.Module, other: nn.Module, folder: Path) -> None:
    """Two models have the same content, to the bit."""
    paths = [folder / "one", folder / "other"]
    for path, model in zip(paths, (one, other), strict=True):
        checkpoint.save(path, model)
    contents = [(saved_content(path), dense_files(path)) for path in paths]
    assert same(*contents)


def change(model: Any, step: int) -> None:
    train(model["tables"], step)
    happen(model["tables"].group, step)
    with torch.no_grad():
        model["top"].weight += step


def fresh() -> nn.ModuleDict:
    """A model with other content."""
    return trained_model(steps=1, ids=20)


def test_every_commit_leads_to_the_content_of_the_trainer(tmp_path: Path) -> None:
    model, path = trained_model(ids=300), tmp_path / "log"
    log = DeltaLog(path, resume=True)
    log.attach(model, state={"step": 0, "moments": torch.arange(3.0)})
    other = fresh()
    for step in range(5):
        if step > 0:
            change(model, step)
            assert log.publish(state=lambda step=step: {"step": step}) == step
            log.flush()
        report = resume(path, other)
        assert report.state["step"] == step
        assert report.tables["tables.users"].exact == (step == 0)
        assert_equal(model, other, tmp_path)
    log.close()


def test_training_goes_on_with_the_bits_of_undisturbed_training(tmp_path: Path) -> None:
    undisturbed, path = trained_model(ids=200), tmp_path / "log"
    log = DeltaLog(path, resume=True)
    assert resume(log, trained_model(ids=200)).state is None  # an empty log begins here
    log.close()
    for step in range(1, 5):
        model = fresh()
        log = DeltaLog(path, resume=True)
        report = resume(log, model)
        assert (0 if report.state is None else report.state["step"]) == log.sequence == step - 1
        change(model, step)
        change(undisturbed, step)
        assert log.publish(state={"step": step}) == step
        change(model, 1)  # is lost
        log.close()
    model = fresh()
    resume(path, model)
    assert_equal(model, undisturbed, tmp_path)


def test_new_bases_and_old_logs(tmp_path: Path) -> None:
    model, path = trained_model(ids=200), tmp_path / "log"
    log = DeltaLog(path, resume=True)
    log.attach(model)
    for step in (1, 2):
        change(model, step)
        log.publish(state={"step": step})
    assert log.save(state={"step": 2}) == 3
    log.close()
    other = fresh()
    (path / "r000-of-001").rename(tmp_path / "away")
    assert resume(path, other).state == {"step": 2}  # of the base
    assert_equal(model, other, tmp_path)
    (tmp_path / "away").rename(path / "r000-of-001")
    log = DeltaLog(path, resume=True)
    log.attach(model)  # is compared: the next commit has all counts
    change(model, 3)
    log.publish(state={"step": 3})
    log.close()
    assert resume(path, other).state == {"step": 3}
    assert_equal(model, other, tmp_path)


def test_new_bases_while_training_goes_on(tmp_path: Path) -> None:
    model, path = trained_model(ids=200), tmp_path / "log"
    log = DeltaLog(path, resume=True, retain=2)
    log.attach(model)
    assert isinstance(log._own.sink, delta_log.DirectorySink)
    log._own.sink.segment_bytes = 1  # a commit a file
    for step in range(1, 5):
        change(model, step)
        log.publish(state={"step": step})
    assert log.save(state={"step": 4}, asynchronous=True) == 5
    for step in range(5, 8):  # the first publish after its end names the base, the next one drops
        change(model, step)
        if log._bases.new is not None:
            log._bases.new.handle.wait()
        log.publish(state={"step": step})
        log.flush()
    log.close()
    assert [of.name for of in path.glob("base*")] == ["base-00000000000000000005"]
    kept = sorted(int(of.stem) for of in path.glob("r*/*.delta"))
    assert kept[-1] == log.sequence == 8
    assert kept[0] == 5  # commit 6 was the last of the two that stay when commit 7 dropped others
    other = fresh()
    assert resume(path, other).state == {"step": 7}
    assert_equal(model, other, tmp_path)


def test_commits_of_a_time_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    retention = Retention("2m")
    for number in range(1, 11):
        monkeypatch.setattr(time, "monotonic", lambda number=number: 60.0 * number)
        retention.published(number)
    assert retention.first(last=10, base=9, former=3) == 8
    assert retention.first(last=10, base=5, former=3) == 6  # followers begin with the base
    assert Retention(4).first(last=10, base=9, former=3) == 7
    assert Retention(None).first(last=10, base=9, former=3) == 4
    for retain in (-1, "soon", 1.5):
        with pytest.raises((TypeError, ValueError), match="DeltaLog: retain is"):
            Retention(retain)  # type: ignore[arg-type]


def test_commits_that_failed_are_in_the_next_one(tmp_path: Path) -> None:
    model, sink = trained_model(ids=200), MemorySink()
    checkpoint.save(tmp_path / "base", model)
    log = DeltaLog(sink, resume=True)
    log.attach(model, base=tmp_path / "base")
    change(model, 1)
    sink.error = OSError(28, "no room")
    log.publish()
    with pytest.raises(OSError, match="no room"):
        log.flush()
    with pytest.raises(TypeError, match=r"state\.of is <object"):
        log.publish(state={"of": object()})
    change(model, 2)
    assert log.publish(state={"step": 2}) == 1
    log.close()
    other = fresh()
    assert resume(sink, other, base=tmp_path / "base").state == {"step": 2}
    assert_equal(model, other, tmp_path)
    log = DeltaLog(sink, resume=True)
    with pytest.raises(ValueError, match="is not in a directory"):
        resume(log, other)
    resume(log, other, base=tmp_path / "base")
    assert log.publish() == 2
    log.close()


@pytest.mark.parametrize("optimizer", [td.RowWiseAdagrad(lr=0.1), td.Adam(lr=0.1)])
def test_columns_on_several_shards(tmp_path: Path, optimizer: td.OptimizerConfig) -> None:
    model, other = ColumnShards([4, 8], optimizer), ColumnShards([4, 8], optimizer)
    whole = ColumnShards([12], optimizer)
    model.train_on(torch.arange(50))
    log = DeltaLog(tmp_path / "log", resume=True)
    log.attach(model)
    model.train_on(torch.tensor([3, 4, 60]))
    first: Any = model.shards[0]
    first(torch.tensor([9])).sum().backward()  # changes one of the shards alone
    first.optimizer.step()
    for shard in model.shards:
        shard.group.erase(0, torch.tensor([5]))  # type: ignore[union-attr, operator]
    log.publish()
    log.close()
    resume(tmp_path / "log", other)
    assert_equal(model, other, tmp_path)
    resume(tmp_path / "log", whole)
    checkpoint.save(tmp_path / "whole", model)
    loaded = ColumnShards([12], optimizer)
    checkpoint.load(tmp_path / "whole", loaded)
    assert_equal(loaded, whole, tmp_path)


def small(**options: Any) -> td.DynamicEmbedding:
    torch.manual_seed(2)
    given: dict[str, Any] = {"optimizer": td.SGD(lr=0.1), "name": "ids", **options}
    model = td.DynamicEmbedding(given.pop("dim", 4), **given)
    model(torch.arange(20)).sum().backward()
    model.optimizer.step()
    return model


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published") / "log"
    model = small()
    with DeltaLog(path, resume=True) as log:
        log.attach(model)
        for number in range(3):
            model(torch.tensor([number, 30 + number])).sum().backward()
            model.optimizer.step()
            log.publish()
    return path


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: small(dim=8), "'embedding' has embedding_dim 4 in the log and 8 in the model"),
        (
            lambda: small(optimizer=td.Adam(lr=0.1)),
            "'embedding' has optimizer {'name': 'SGD'.*in the log and {'name': 'Adam'",
        ),
        (lambda: small(dtype=torch.bfloat16), "dtype 'float32' in the log and 'bfloat16'"),
        (lambda: small(policy=td.Policy(score="step")), r"scores \[\] in the log and \['step'\]"),
        (
            lambda: small(policy=td.Policy(admission=td.AdmitFrequent(2))),
            "admission None in the log and 'AdmitFrequent' in the model",
        ),
        (lambda: small(padding_idx=5), "padding_idx None in the log and 5"),
        (
            lambda: nn.Sequential(small()),
            r"tables \['embedding'\] are only in the log, and \['0'\] only in the model",
        ),
    ],
)
def test_other_models_are_refused(
    published: Path, model: Callable[[], nn.Module], told: str
) -> None:
    given = model()
    before = {name: of.clone() for name, of in given.state_dict().items()}
    with pytest.raises(ValueError, match=f"resume: .*{told}"):
        resume(published, given)
    assert same(before, dict(given.state_dict()))


def test_logs_that_lack_something_are_refused(published: Path, tmp_path: Path) -> None:
    model = small()
    with DeltaLog(tmp_path / "log", optimizer_state=True) as log:
        log.attach(model)
        with pytest.raises(ValueError, match=r"state is given, but .*give DeltaLog\(resume=True\)"):
            log.publish(state={"step": 1})
        log.publish()
    with pytest.raises(ValueError, match=r"commit 1 was published .*DeltaLog\(resume=True\)"):
        resume(tmp_path / "log", small())
    with pytest.raises(ValueError, match=r"resume is True, but commit 1 .*resume=False"):
        DeltaLog(tmp_path / "log", resume=True).attach(model)
    with pytest.raises(ValueError, match="constructed without resume=True"):
        resume(DeltaLog(tmp_path / "log"), model)
    with pytest.raises(ValueError, match=r"resume is False, but commit 1 .*resume=True"):
        DeltaLog(damage.copied(published, tmp_path / "copy")).attach(model)
    with pytest.raises(ValueError, match="resume is True and dense is False"):
        DeltaLog(tmp_path / "other", resume=True, dense=False)
    with pytest.raises(FileNotFoundError):
        resume(tmp_path / "nothing", model)
    with pytest.raises(TypeError, match="log is 3, expected the directory"):
        resume(3, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state is 3, expected a dict"):
        DeltaLog(tmp_path / "other", resume=True).attach(model, state=3)  # type: ignore[arg-type]


def test_gaps_and_damage_are_errors(published: Path, tmp_path: Path) -> None:
    sink, lost = delta_log.DirectorySink(published / "r000-of-001"), MemorySink()
    for number, data in enumerate(sink.read(0), start=1):
        lost.batches[number] = bytes(data)
    model = small()
    before = model.group.read(0, torch.arange(20))
    del lost.batches[2]
    with pytest.raises(errors.NewBaseNeededError, match="the next one available is 3"):
        resume(lost, model, base=published / "base")
    for at in (200, 500):
        path = damage.copied(published, tmp_path / str(at))
        [segment] = path.glob("r000-of-001/*.delta")
        damage.flip(at, 1)(segment)
        with pytest.raises(errors.DamagedFileError, match=r"rollback\(\)"):
            resume(path, model)
    assert torch.equal(before, model.group.read(0, torch.arange(20)))


def test_one_trainer_at_a_time_between_two_steps(tmp_path: Path) -> None:
    log, model = DeltaLog(tmp_path / "log", resume=True), small(split=True)
    model(torch.arange(3)).sum().backward()
    with pytest.raises(RuntimeError, match="gradients pending"):
        resume(log, model)
    model.optimizer.step()
    resume(log, model)
    log.publish()
    with pytest.raises(errors.InUseError, match="has a writer, process"):
        resume(DeltaLog(tmp_path / "log", resume=True), small(split=True))
    with pytest.raises(RuntimeError, match="already has a model"):
        resume(log, model)
    log.close()
    model(torch.arange(3)).sum().backward()
    for of in (tmp_path / "log", DeltaLog(tmp_path / "log", resume=True)):
        with pytest.raises(RuntimeError, match="gradients pending"):
            resume(of, model)


def test_times_go_on_if_the_clock_jumps_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tables() -> td.DynamicEmbedding:
        policy = td.Policy(score="timestamp", capacity=100)
        return td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), policy=policy)

    def step(model: td.DynamicEmbedding, seconds: int) -> int:
        monkeypatch.setattr(time, "time", lambda: float(seconds))
        model(torch.tensor([1])).sum().backward()
        model.optimizer.step()
        model(torch.tensor([1])).sum().backward()
        model.optimizer.step()
        return int(stored_scores(model.group.tables, 0, torch.tensor([1]), None).scores)

    model = tables()
    with DeltaLog(tmp_path / "log", resume=True) as log:
        resume(log, model)
        assert step(model, 5_000) == 5_000
        log.publish()
    again = tables()
    resume(tmp_path / "log", again)
    assert step(again, 4_000) == 5_000
    assert step(again, 6_000) == 6_000


def test_rows_on_a_disk_resume_from_snapshots(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--device") != "cpu":
        pytest.skip("rows on disks are of the CPU")
    storage = td.SSDStore(tmp_path / "rows", cache="64 rows", disk="1MB", segment="64KiB")
    model = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), storage=storage)
    with pytest.raises(RuntimeError, match=r"resumes from its last snapshot: call .*save_snapshot"):
        resume(DeltaLog(tmp_path / "log", resume=True), model)
    assert not (tmp_path / "log" / "base").exists()
