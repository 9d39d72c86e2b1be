"""Delta logs of some tables and some ids: ``DeltaLog(tables=, keep=)``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from memory_sink import MemorySink
from ranks import Ranks

import torch_dynemb as td
from torch_dynemb.changes.commits import commit_of
from torch_dynemb.table.tables import exported

pytestmark = pytest.mark.cpu_only("writes files and, in one test, has several processes")

LEAST = td.AtLeast(3, by="frequency", leave_below=2)
TOP = td.Top(2, by="frequency")
POLICY = td.Policy(score="frequency")


def new_model(process_group: dist.ProcessGroup | None = None) -> td.DynamicEmbeddingBagCollection:
    torch.manual_seed(3)
    tables = [td.TableConfig(name, 4, [name], policy=POLICY) for name in ("ads", "users")]
    return td.DynamicEmbeddingBagCollection(
        tables, mode="sum", optimizer=td.SGD(lr=1.0), process_group=process_group
    )


def train(model: td.DynamicEmbeddingBagCollection, ids: list[int]) -> None:
    given = torch.tensor([ids])
    model({"ads": given, "users": given}).sum().backward()
    model.optimizer.step()


def set_frequency(model: td.DynamicEmbeddingBagCollection, id: int, frequency: int) -> None:
    for table in range(2):
        model.group.scores.set(
            table, torch.tensor([id]), torch.tensor([frequency]), score="frequency"
        )


def ids_of(model: td.DynamicEmbeddingBagCollection) -> list[list[int]]:
    group = model.group
    found = [[batch.ids for batch in exported(group.tables, table, 1 << 10)] for table in range(2)]
    return [sorted(torch.cat(ids).tolist()) if ids else [] for ids in found]


class Followed:
    """A model, its log, and followers: one from the base, and a live copy with the same rule."""

    def __init__(self, path: Path, **arguments: object) -> None:
        self.model = new_model()
        train(self.model, [1, 1, 1, 2, 2, 3])
        self.log = td.delta_log.DeltaLog(path, **arguments)
        self.log.attach(self.model)
        self.live = td.serving.live(self.model, headroom=99, keep=arguments.get("keep"))
        base = path / "base"
        self.copy = new_model()
        td.checkpoint.load(base, self.copy)
        self.followers = [
            td.delta_log.follow(path, model, base=base) for model in (self.copy, self.live)
        ]

    def publish(self) -> list[list[int]]:
        """The ids of the followers after another commit; both have the model's rows of them."""
        self.log.publish()
        return self.read()

    def read(self) -> list[list[int]]:
        self.log.flush()
        for follower in self.followers:
            follower.update()
        found = ids_of(self.copy)
        (tables,) = td.serving.live_tables(self.live).values()
        assert list(tables.sizes().values()) == [len(ids) for ids in found]
        for table, ids in enumerate(found):
            given = torch.tensor(ids)
            rows = [of.group.read(table, given) for of in (self.model, self.copy)]
            assert torch.equal(*rows)
        everything = {name: torch.arange(9)[:, None] for name in ("ads", "users")}
        assert torch.equal(self.live(everything), self.copy.eval()(everything))
        return found


def test_ids_come_by_one_score_and_leave_by_another(tmp_path: Path) -> None:
    followed = Followed(tmp_path / "log", keep={"ads": LEAST})
    model = followed.model
    assert followed.publish() == [[1], [1, 2, 3]]
    train(model, [2, 4, 4, 4, 4])
    assert followed.publish() == [[1, 2, 4], [1, 2, 3, 4]]
    set_frequency(model, 1, 2)
    assert followed.publish()[0] == [1, 2, 4]  # between both scores: it stays
    set_frequency(model, 1, 1)
    assert followed.publish()[0] == [2, 4]
    set_frequency(model, 1, 2)
    assert followed.publish()[0] == [2, 4]  # and does not come back
    set_frequency(model, 1, 3)
    assert followed.publish()[0] == [1, 2, 4]  # without a change of its row
    model.group.erase(0, torch.tensor([2]))
    assert followed.publish()[0] == [1, 4]
    followed.log.close()


def test_the_best_ids_are_those_of_each_commit(tmp_path: Path) -> None:
    followed = Followed(tmp_path / "log", keep=TOP)
    assert followed.publish() == [[1, 2]] * 2
    train(followed.model, [3, 3])
    assert followed.publish() == [[1, 3]] * 2  # ties go by id
    set_frequency(followed.model, 2, 9)
    assert followed.publish() == [[1, 2]] * 2
    followed.log.save()  # the base has all ids, and the commit after it removes the others
    base = followed.log._path / "base-00000000000000000004"
    late = new_model()
    td.checkpoint.load(base, late)
    assert ids_of(late) == [[1, 2, 3]] * 2
    td.delta_log.follow(tmp_path / "log", late, base=base).update()
    assert ids_of(late) == followed.read() == [[1, 2]] * 2
    followed.log.close()


def test_a_log_goes_on_after_a_failure_and_after_a_restart(tmp_path: Path) -> None:
    followed = Followed(tmp_path / "log", keep={"ads": LEAST, "users": TOP})
    assert followed.publish() == [[1], [1, 2]]
    train(followed.model, [3, 3, 3])
    sink = followed.log._own.sink
    append, sink.append = sink.append, lambda *_: (_ for _ in ()).throw(OSError("full"))
    followed.log.publish()
    with pytest.raises(OSError, match="full"):
        followed.log.flush()
    sink.append = append
    assert followed.publish() == [[1, 3], [1, 3]]
    set_frequency(followed.model, 3, 2)
    followed.log.close()
    # its state is not saved: it begins with the ids that have the score to come
    followed.log.attach(followed.model)
    assert followed.publish() == [[1], [1, 2]]
    train(followed.model, [3])
    assert followed.publish() == [[1, 3], [1, 3]]
    followed.log.close()


def test_a_log_of_some_tables(tmp_path: Path) -> None:
    followed = Followed(tmp_path / "log", tables=["users"], keep={"users": TOP})
    followed.live = td.serving.live(followed.model, headroom=99)
    followed.followers.pop()
    train(followed.model, [5, 5, 5, 5])
    followed.log.publish()
    followed.log.flush()
    followed.followers[0].update()
    assert ids_of(followed.copy) == [[1, 2, 3], [1, 5]]
    batch = next(iter(followed.log._own.batches(0)))
    assert commit_of([batch]).tables.keys() == {"users"}
    followed.log.close()


def test_what_is_refused(tmp_path: Path) -> None:
    for arguments, error, message in (
        ({"keep": 5}, TypeError, r"DeltaLog: keep is 5, expected torch_dynemb\.Top"),
        ({"keep": {"ads": None}}, TypeError, "DeltaLog: keep is None, expected"),
        ({"tables": "ads"}, TypeError, "DeltaLog: tables is 'ads', expected names in a list"),
        ({"tables": []}, ValueError, r"DeltaLog: tables is \[\], expected the name of at least"),
        ({"tables": [3]}, ValueError, r"DeltaLog: tables is \[3\], expected the name"),
        (
            {"resume": True, "tables": ["ads"]},
            ValueError,
            r"resume is True and tables is \['ads'\]",
        ),
        ({"resume": True, "keep": TOP}, ValueError, r"resume is True and keep is Top\("),
    ):
        with pytest.raises(error, match=message):
            td.delta_log.DeltaLog(tmp_path / "log", **arguments)
    model = new_model()
    by_time = td.Top(2, by="timestamp")
    for arguments, message in (
        ({"tables": ["items"]}, r"tables names tables \['items'\], but the model has \['ads', 'u"),
        ({"keep": {"items": TOP}}, r"keep names tables \['items'\], but the model has \['ads'"),
        ({"tables": ["ads"], "keep": {"users": TOP}}, r"keep names tables \['users'\]"),
        ({"keep": by_time}, r"does not keep score 'timestamp', but \['step', 'frequency'\]"),
    ):
        log = td.delta_log.DeltaLog(MemorySink(), **arguments)
        with pytest.raises(ValueError, match=message):
            log.attach(model, base=tmp_path / "none")
    assert model.group.tables.host.readers == {}


def ranked(rank: int, path: Path) -> tuple[list[list[int]], list[list[int]]]:
    """The ids that a follower of two ranks has on a rank at the end, and those of a frozen copy."""
    model = new_model(dist.group.WORLD)
    for id in range(8):
        train(model, [id] * (id + 1 + (id == 0)))
    log = td.delta_log.DeltaLog(path, keep={"ads": td.Top(3, by="frequency"), "users": LEAST})
    log.attach(model)
    log.publish()
    for _ in range(3):
        train(model, [0, 0])
    log.publish()
    frozen = td.freeze(model, keep={"ads": td.Top(3, by="frequency"), "users": LEAST})
    log.close()
    copied = [sorted(frozen.frozen_tables.ids(table).tolist()) for table in range(2)]
    return ids_of(model), copied


@pytest.mark.long
def test_ranks_agree_on_the_best_ids(two_ranks: Ranks, tmp_path: Path) -> None:
    (first, copied), (second, other) = two_ranks.run(ranked, tmp_path / "log")
    assert min(len(ids) for ids in first + second) > 0
    assert sorted(first[0] + second[0]) == list(range(8))
    follower = new_model()
    td.checkpoint.load(tmp_path / "log" / "base", follower)
    assert td.delta_log.replay(tmp_path / "log", follower) == 2
    # both ranks train the ids: 2 * 8 times id 0, then those of 2 * 8 and 2 * 7
    assert copied == other == ids_of(follower) == [[0, 6, 7], list(range(8))]
