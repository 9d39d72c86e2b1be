"""Delta logs that fail, go on, are rolled back, or are not what a follower has read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from logged_models import DIM, Model, act, content, train
from memory_sink import MemorySink

import torch_dynemb as td
from torch_dynemb.delta_log import DeltaLog, NewBaseNeededError, follow, replay
from torch_dynemb.errors import InUseError
from torch_dynemb.files.claim import Claim

pytestmark = pytest.mark.any_device


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)


def begun(tmp_path: Path, **options: Any) -> tuple[Model, DeltaLog, torch.Generator]:
    """A model that has trained, and a log that is attached to it."""
    model, drawn = Model(), generator()
    train(model, drawn)
    log = DeltaLog(tmp_path / "log", **options)
    log.attach(model)
    return model, log, drawn


def replayed(path: Path, **options: Any) -> Model:
    copy = Model(seed=9)
    replay(path, copy, **options)
    return copy


@pytest.mark.parametrize("kept", [False, True])
def test_changes_that_were_not_written_are_in_the_next_commit(tmp_path: Path, kept: bool) -> None:
    model, drawn, sink = Model(), generator(), MemorySink()
    train(model, drawn)
    td.checkpoint.save(tmp_path / "base", model)
    log = DeltaLog(sink, every_steps=1)
    with pytest.raises(ValueError, match="base is None"):
        log.attach(model)
    log.attach(model, base=tmp_path / "base")
    copy = Model(seed=9)
    td.checkpoint.load(tmp_path / "base", copy)
    follower = follow(sink, copy, base=tmp_path / "base")
    for step in range(12):
        train(model, drawn)
        model.bags.group.erase(1, torch.arange(step, 60, 7, device=model.bags.group.device))
        expected = content(model, state=False)
        if step % 3 == 1:
            sink.error, sink.kept = OSError(28, "no room"), kept
        assert log.step() == (follower.sequence or 0) + 1
        if step % 3 == 1 and not kept:
            with pytest.raises(OSError, match="no room"):
                log.flush()
            assert follower.update() == 0
            continue
        log.flush()  # a commit that was kept is there, although its append has raised
        assert follower.update() == 1
        assert content(copy, state=False) == expected
    sink.error, sink.kept = OSError(28, "no room"), False
    log.publish()
    with pytest.raises(OSError, match="no room"):
        log.close()


def test_a_trainer_goes_on_from_any_checkpoint(tmp_path: Path) -> None:
    model, log, drawn = begun(tmp_path, optimizer_state=True)
    for step in range(6):
        act(model, drawn)
        log.publish()
        if step == 2:
            td.checkpoint.save(tmp_path / "third", model)
    log.close()
    follower_model = replayed(tmp_path / "log")
    follower = follow(tmp_path / "log", follower_model, sequence=6)
    again, log = Model(seed=3), DeltaLog(tmp_path / "log", optimizer_state=True)
    td.checkpoint.load(tmp_path / "third", again)
    log.attach(again)
    assert log.sequence == 6
    assert log.publish() == 7
    log.flush()
    assert follower.update() == 1
    assert content(follower_model) == content(again) == content(replayed(tmp_path / "log"))
    train(again, drawn)
    log.publish()
    log.close()
    follower.update()
    assert content(follower_model) == content(again)


def test_a_trainer_goes_on_after_it_ended_before_its_first_commit(tmp_path: Path) -> None:
    model, log, drawn = begun(tmp_path)
    copy = Model(seed=9)
    td.checkpoint.load(tmp_path / "log" / "base", copy)
    follower = follow(tmp_path / "log", copy)
    train(model, drawn)
    log.close()
    log = DeltaLog(tmp_path / "log")
    log.attach(model)
    log.publish()
    log.close()
    assert follower.update() == 1
    assert content(copy, state=False) == content(model, state=False)


def test_a_trainer_needs_all_commits_since_its_base(tmp_path: Path) -> None:
    model, drawn, sink = Model(), generator(), MemorySink()
    td.checkpoint.save(tmp_path / "base", model)
    log = DeltaLog(sink)
    log.attach(model, base=tmp_path / "base")
    for _ in range(3):
        train(model, drawn)
        log.publish()
    log.close()
    del sink.batches[1]
    with pytest.raises(NewBaseNeededError, match="the log lacks commit 1: give a newer base"):
        log.attach(model, base=tmp_path / "base")


def test_a_close_that_is_interrupted_leaves_the_log_to_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, log, drawn = begun(tmp_path)
    append, may_go_on = log._own.sink.append, threading.Event()

    def waiting(data: memoryview, sequence: int) -> None:
        may_go_on.wait()
        append(data, sequence)

    def interrupted(event: threading.Event) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(log._own.sink, "append", waiting)
    train(model, drawn)
    log.publish()
    with monkeypatch.context() as patch:
        patch.setattr("torch_dynemb.delta_log.publishing.wait_until_set", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log.close()
    with pytest.raises(InUseError, match="has a writer"):
        DeltaLog(tmp_path / "log").attach(Model())
    assert (log.sequence, log.durable_sequence) == (1, 0)
    may_go_on.set()
    log.close()
    assert log.durable_sequence == 1
    DeltaLog(tmp_path / "log").rollback(0)


def test_what_has_not_changed_is_not_published_again(tmp_path: Path) -> None:
    model, log, drawn = begun(tmp_path)
    log.close()
    log = DeltaLog(tmp_path / "log")
    log.attach(model)
    log.publish()
    train(model, drawn)
    log.publish()
    log.publish()
    log.close()
    first, second, third = (
        sum(delta.changed.ids.numel() + delta.removed.numel() for delta in commit.tables.values())
        for commit in commits(tmp_path / "log")
    )
    assert (first, third) == (0, 0)
    assert 0 < second <= 6 * 6 + 1


def commits(path: Path) -> list[td.delta_log.Commit]:
    """All commits of a log, by a target that keeps them."""

    class Kept:
        def __init__(self) -> None:
            self.commits: list[td.delta_log.Commit] = []

        def check(self, commit: td.delta_log.Commit) -> None:
            assert commit.sequence == len(self.commits) + 1

        def apply(self, commit: td.delta_log.Commit) -> None:
            self.commits.append(commit)

    kept = Kept()
    follow(path, kept).update()
    return kept.commits


def test_a_log_is_rolled_back_and_who_has_read_further_is_told(tmp_path: Path) -> None:
    model, log, drawn = begun(tmp_path)
    contents = {}
    for _ in range(5):
        train(model, drawn)
        contents[log.publish()] = content(model, state=False)
    with pytest.raises(RuntimeError, match=r"close\(\) the log, roll back"):
        log.rollback(3)
    log.close()
    ahead = follow(tmp_path / "log", replayed(tmp_path / "log"), sequence=4)
    behind = follow(tmp_path / "log", replayed(tmp_path / "log", until=2), sequence=2)
    assert ahead.update() == 1
    with pytest.raises(ValueError, match="the log has no such commit"):
        log.rollback(7)
    log.rollback(3)
    for _ in range(2):
        with pytest.raises(NewBaseNeededError, match="commit 5 was read last, but it was removed"):
            ahead.update()
    assert (ahead.sequence, behind.sequence) == (5, 2)
    assert log.sequence == 3
    assert content(replayed(tmp_path / "log"), state=False) == contents[3]
    model = replayed(tmp_path / "log")
    log.attach(model)
    for _ in range(3):
        train(model, generator(5))
        log.publish()
    log.close()
    with pytest.raises(NewBaseNeededError, match="the log was rolled back"):
        ahead.update()
    assert behind.update() == 4
    with pytest.raises(ValueError, match="until is 9"):
        replayed(tmp_path / "log", until=9)


def test_a_log_of_another_optimizer_is_replayed_without_its_state(tmp_path: Path) -> None:
    model, log, drawn = begun(tmp_path)
    train(model, drawn)
    log.publish()
    log.close()
    other = Model(seed=9)
    other.bags.set_optimizer(td.SGD(lr=0.1))
    with pytest.raises(ValueError, match="give optimizer_state=False"):
        replay(tmp_path / "log", other)
    replay(tmp_path / "log", other, optimizer_state=False)
    assert content(other, state=False) == content(model, state=False)


@pytest.mark.parametrize("ends", [False, True])
def test_a_sink_that_is_rolled_back_is_noticed(tmp_path: Path, ends: bool) -> None:
    class Ending(MemorySink):
        def ending(self, sequence: int) -> bytes | None:
            return next((data[-48:] for data in self.read(sequence)), None)

    model, drawn, sink = Model(), generator(), Ending() if ends else MemorySink()
    train(model, drawn)
    td.checkpoint.save(tmp_path / "base", model)
    log = DeltaLog(sink)
    log.attach(model, base=tmp_path / "base")
    follower = follow(sink, Model(seed=9), base=tmp_path / "base")
    for _ in range(3):
        train(model, drawn)
        log.publish()
    log.close()
    assert follower.update() == 3
    assert follower.update() == 0
    log.rollback(2)
    with pytest.raises(NewBaseNeededError, match="the log was rolled back"):
        follower.update()
    train(model, drawn)
    log.attach(model, base=tmp_path / "base")
    log.publish()
    log.close()  # another commit 3
    with pytest.raises(NewBaseNeededError, match="or replaced"):
        follower.update()


def test_a_newer_base_replaces_older_commits(tmp_path: Path) -> None:
    model, log, drawn = begun(tmp_path)
    late = Model(seed=9)
    td.checkpoint.load(tmp_path / "log" / "base", late)
    stays = follow(tmp_path / "log", late)
    slow = follow(tmp_path / "log", Model(seed=9))
    log._own.sink.segment_bytes = 1  # a file for each commit
    for _ in range(3):
        train(model, drawn)
        log.publish()
    log.flush()
    assert (stays.update(), slow.update(until=2)) == (3, 2)
    assert log.save() == 4
    with pytest.raises(ValueError, match=r"has the bases \['base', 'base-0{19}4'\]: give"):
        follow(tmp_path / "log", late)
    follow(tmp_path / "log", late, base=tmp_path / "log" / "base")
    train(model, drawn)
    log.publish()
    log.flush()
    assert (stays.update(), slow.update(until=3)) == (3, 1)
    with pytest.raises(ValueError, match="before is 6, expected at most 5"):
        log.truncate(6)
    log.truncate(5)
    assert content(late, state=False) == content(model, state=False)
    with pytest.raises(NewBaseNeededError, match="dropped or lost"):
        slow.update()
    new = replayed(tmp_path / "log")
    assert content(new, state=False) == content(model, state=False)
    log.close()
    log = DeltaLog(tmp_path / "log")
    log.attach(model)
    assert log.publish() == 7
    assert (log.save(), log.save()) == (8, 10)
    log.close()
    bases = sorted(path.name[-2:] for path in (tmp_path / "log").glob("base*"))
    assert bases == ["08", "10"]
    assert content(replayed(tmp_path / "log"), state=False) == content(model, state=False)


def test_drafts_of_dead_bases_are_removed(tmp_path: Path) -> None:
    model, log, drawn = begun(tmp_path)
    dead = tmp_path / "log" / f"base-{7:020}.tmp-{'0' * 32}"
    theirs = tmp_path / "log" / f"notes.tmp-{'0' * 32}"
    for folder in (dead, theirs):
        folder.mkdir()
        Claim(folder).release()
    log.save()
    for _ in range(2):
        train(model, drawn)
        log.publish()
    log.close()
    assert theirs.exists()
    assert not dead.exists()


def test_another_base_is_refused(tmp_path: Path) -> None:
    model, log, drawn = begun(tmp_path)
    train(model, drawn)
    log.publish()
    log.close()
    td.checkpoint.save(tmp_path / "other", model)
    with pytest.raises(NewBaseNeededError, match=r"since the checkpoints \['[0-9a-f]{32}'\]"):
        follow(tmp_path / "log", model, base=tmp_path / "other").update()
    log = DeltaLog(tmp_path / "log")
    with pytest.raises(ValueError, match="give the base of the log, or publish to a new"):
        log.attach(model, base=tmp_path / "other")
    log.attach(model)  # the lock and the readers of changes are free again
    log.close()


def test_replaced_tables_need_a_new_base(tmp_path: Path) -> None:
    model, log, _ = begun(tmp_path)
    td.checkpoint.load(tmp_path / "log" / "base", model)
    with pytest.raises(RuntimeError, match=r"were replaced.*attach the log"):
        log.publish()
    log.close()
    log = DeltaLog(tmp_path / "log")
    log.attach(model)
    model.one.set_optimizer(td.SGD(lr=0.1))
    with pytest.raises(RuntimeError, match=r"were replaced.*attach the log"):
        log.publish()
    log.close()
    log.attach(model)
    log.publish()
    log.close()
    same = Model(seed=9)
    same.one.set_optimizer(td.SGD(lr=0.1))
    td.checkpoint.load(tmp_path / "log" / "base", same, optimizer_state=False)
    follow(tmp_path / "log", same).update()
    assert content(same, state=False) == content(model, state=False)


def test_models_that_do_not_fit_are_refused_whole(tmp_path: Path) -> None:
    model, log, drawn = begun(tmp_path)
    for _ in range(4):
        train(model, drawn)
    log.publish()
    log.close()
    small = torch.nn.Module()
    small.bags = Model().bags
    follower = follow(tmp_path / "log", small)
    with pytest.raises(ValueError, match=r"changes tables \['one'\], but the model has \['bags"):
        follower.update()
    small.one = td.DynamicEmbedding(7, optimizer=td.SGD(lr=0.1))
    with pytest.raises(ValueError, match="table 'one' has 8 columns in the log, and 7"):
        follower.update()
    small.one = td.DynamicEmbedding(8, optimizer=td.SGD(lr=0.1))
    small.dense = torch.nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"dense tensor 'dense.weight' of shape \(1, 16\)"):
        follower.update()
    small.dense = torch.nn.Linear(16, 1)
    configs = [
        td.TableConfig("a", DIM, policy=td.Policy(capacity=9, score="step")),
        td.TableConfig("b", DIM),
    ]
    small.bags = td.DynamicEmbeddingBagCollection(configs, optimizer=td.Adam(lr=0.1))
    with pytest.raises(RuntimeError, match="a capacity of 9"):
        follower.update()
    assert small.bags.group.size(1) == small.one.group.size(0) == 0
    assert follower.sequence == 0


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DeltaLog: every_steps is 0"):
        DeltaLog(tmp_path, every_steps=0)
    with pytest.raises(ValueError, match="DeltaLog: every_seconds is -1"):
        DeltaLog(tmp_path, every_seconds=-1)
    with pytest.raises(TypeError, match="DeltaLog: log is 3, expected a path, or a sink"):
        DeltaLog(3)  # type: ignore[arg-type]
    log = DeltaLog(tmp_path / "log")
    with pytest.raises(RuntimeError, match="the log has no model"):
        log.publish()
    with pytest.raises(TypeError, match="model is 5, expected a torch"):
        log.attach(5)  # type: ignore[arg-type]
    model = Model()
    log.attach(model)
    with pytest.raises(RuntimeError, match="has a model"):
        log.attach(model)
    with pytest.raises(RuntimeError, match="has a writer, process"):
        DeltaLog(tmp_path / "log").attach(model)
    with pytest.raises(ValueError, match="step is -1"):
        log.publish(-1)
    with pytest.raises(ValueError, match="both base"):
        follow(tmp_path / "log", model, base=tmp_path, sequence=1)
    with pytest.raises(TypeError, match="expected a module with tables that train"):
        follow(tmp_path / "log", torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="expected the directory of a delta log"):
        follow(3, model, sequence=1)  # type: ignore[arg-type]
    log.close()


@pytest.mark.parametrize("change", ["replaced", "swapped", "added", "removed", "renamed"])
def test_a_log_of_other_modules_does_not_go_on(tmp_path: Path, change: str) -> None:
    def table(name: str) -> td.DynamicEmbedding:
        return td.DynamicEmbedding(2, name=name, optimizer=td.SGD(lr=0.1))

    model = torch.nn.ModuleDict({"a": table("t"), "b": table("t")})
    with DeltaLog(tmp_path / "log", dense=False) as log:
        log.attach(model)
        log.publish()
        if change == "replaced":
            model["a"] = table("t")
        elif change == "swapped":
            model["a"], model["b"] = model["b"], model["a"]
        elif change == "added":
            model["c"] = table("c")
        elif change == "removed":
            del model["b"]
        else:
            model["c"] = model.pop("b")
        model["a"](torch.arange(3)).sum().backward()
        with pytest.raises(NewBaseNeededError, match="replaced, renamed, added or removed"):
            log.publish()
