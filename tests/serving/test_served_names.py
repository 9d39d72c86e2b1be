"""Tables of equal names in served models: the log that each follows, and what it counts."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import delta_log, serving
from torch_dynemb.delta_log.reader import LogPosition
from torch_dynemb.serving.table_names import ServedName, names_in_log

pytestmark = pytest.mark.cpu_only("names do not depend on the device")


class Model(nn.Module):
    """A table, and a collection that has one of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.item = td.DynamicEmbedding(2, name="item", optimizer=td.SGD(lr=1.0))
        self.bags = td.DynamicEmbeddingBagCollection(
            [td.TableConfig("item", 2), td.TableConfig("user", 2)], optimizer=td.SGD(lr=1.0)
        )
        for number, (group, table) in enumerate(self.tables()):
            group.insert_or_assign(table, torch.tensor([1]), torch.full((1, 2), 10.0 * number))

    def tables(self) -> list[tuple[td.TableGroup, str]]:
        return [(self.item.group, "item"), (self.bags.group, "item"), (self.bags.group, "user")]

    def rows(self) -> list[float]:
        return [float(group.read(table, torch.tensor([1]))[0, 0]) for group, table in self.tables()]

    def forward(self, ids: Tensor) -> Tensor:
        bags = self.bags({"item": ids[:, None], "user": ids[:, None]})
        return torch.cat([self.item(ids), bags], 1)


class Outer(nn.Module):
    """A model within another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids)  # type: ignore[no-any-return]


def served_rows(model: nn.Module) -> list[float]:
    found = {}
    for tables in serving.live_tables(model).values():
        for name in tables.names:
            state = tables.state()
            rows = state.stored_rows(tables.names.index(name), torch.tensor([1])).rows
            found[len(tables.names), name] = float(rows[0, 0])
    return [found[1, "item"], found[2, "item"], found[2, "user"]]


@pytest.mark.parametrize("of", ["item", "bags"])
@pytest.mark.parametrize(
    "serve",
    [
        lambda model: serving.live(model, headroom=5),
        lambda model: serving.CountsMissing(serving.live(model, headroom=5)),
        lambda model: serving.live(td.freeze(model, missing=True), headroom=5),
        lambda model: serving.live(Outer(model), headroom=5),
    ],
    ids=["itself", "counted", "counted before", "within another"],
)
def test_tables_of_equal_names_follow_their_own(
    tmp_path: Path, serve: Callable[[nn.Module], nn.Module], of: str
) -> None:
    model = Model()
    served = serve(model)
    with delta_log.DeltaLog(tmp_path, dense=False) as log:
        log.attach(model)
        follower = delta_log.follow(tmp_path, served)
        model.get_submodule(of).group.insert_or_assign(
            "item", torch.tensor([1]), torch.full((1, 2), 77.0)
        )
        log.publish()
        log.flush()
        follower.update()
    assert served_rows(served) == model.rows()


def test_a_log_of_some_tables_changes_no_others(tmp_path: Path) -> None:
    model = Model()
    served = serving.live(model, headroom=5)
    with delta_log.DeltaLog(tmp_path, tables=["item"], dense=False) as log:
        log.attach(model)
        follower = delta_log.follow(tmp_path, served)
        model.item.group.insert_or_assign("item", torch.tensor([1]), torch.full((1, 2), 77.0))
        log.publish()
        log.flush()
        follower.update()
    assert served_rows(served) == model.rows() == [77.0, 10.0, 20.0]


def test_names_that_may_be_of_two_tables_are_refused() -> None:
    first, second = ServedName("a.tower", "t", True), ServedName("b.tower", "t", True)
    assert names_in_log("follow", [first, second], {"a.tower", "b.tower"}) == ["a.tower", "b.tower"]
    assert names_in_log("follow", [first, ServedName("x", "t", False)], {"tower"}) == [
        "tower",
        None,
    ]
    with pytest.raises(ValueError, match=r"follow: table 'tower' may be either of \['a.tower.t', "):
        names_in_log("follow", [first, second], {"tower"})
    base = {"item": 2}
    position = LogPosition("uuid", None, 0, 0, base)
    with pytest.raises(ValueError, match=r"base has tables .* none that could be 'bags.item'"):
        serving.export(
            serving.live(Model(), headroom=1),
            "unused",
            (torch.tensor([1]),),
            base=position,
        )


def test_models_of_the_same_tables_count_for_themselves() -> None:
    model = Model()
    frozen = td.freeze(model)
    whole = serving.CountsMissing(frozen)
    ids = torch.tensor([1, 5, 6])
    expected = [2, 2, 2]
    assert whole(ids)[1].tolist() == expected
    part = serving.CountsMissing(frozen.get_submodule("bags"))
    given = {"item": ids[:, None], "user": torch.ones(3, 1, dtype=torch.int64)}
    assert part(given)[1].tolist() == [2, 0]
    assert whole(ids)[1].tolist() == expected
    outer = td.freeze(Outer(whole), missing=True)
    (output, inner), counts = outer(ids)
    assert torch.equal(output, frozen(ids))
    assert inner.tolist() == counts.tolist() == expected


class Both(nn.Module):
    """Two models of other ids."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(ids)[1], self.second(ids[1:])[1]


def test_a_copy_counts_beside_its_source() -> None:
    first = td.freeze(Model(), missing=True)
    second = pickle.loads(pickle.dumps(first))
    ids = torch.tensor([1, 5, 6, 7])
    (one, other), both = serving.CountsMissing(Both(first, second))(ids)
    assert one.tolist() == other.tolist() == first(ids)[1].tolist() == [3, 3, 3]
    assert both.tolist() == [3] * 6
    assert second(ids[:2])[1].tolist() == [1, 1, 1]
