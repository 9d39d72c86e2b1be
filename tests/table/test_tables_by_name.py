"""Every method that takes a table takes its name or its number, and names those that there are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import torch_dynemb as td
from torch_dynemb.table.group_tables import GroupTables

pytestmark = pytest.mark.any_device
IDS = torch.tensor([1, 2, 3])
ROWS = torch.ones(3, 4)
# settings and tensors of groups, apart from views
RECORDS = ("config", "index", "rows", "tables")
# further arguments of methods, by the owner and the name of the method
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "contains": (IDS,),
    "erase": (IDS[:1],),
    "fill": (0.5,),
    "insert": (IDS,),
    "insert_or_assign": (IDS, ROWS),
    "read": (IDS,),
    "reserve": (10,),
    "sample_ids": (2,),
    "scores.get": (IDS,),
    "scores.set": (IDS, IDS),
    "scores.set_batch": (3,),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "insert": {"scores": IDS},
    "insert_or_assign": {"scores": IDS},
    "remove": {"predicate": lambda ids, rows: ids == 2},
    "remove_in_slices": {"predicate": lambda ids, rows: ids == 2},
    "sample_ids": {"generator": 0},
}


class Method(NamedTuple):
    """Method of a group or of one of its views, with the argument that names tables."""

    path: str
    argument: str


def methods() -> Iterator[Method]:
    """All public methods with an argument for tables, of groups and of their views."""
    views = [name for name, of in vars(GroupTables).items() if isinstance(of, property)]
    made = group()
    for view in ["", *views]:
        kind = type(getattr(made, view)) if view else type(made)
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            for argument in set(inspect.signature(function).parameters) & {
                "table",
                "feature_tables",
            }:
                path = f"{view}.{name}" if view else name
                if not name.startswith("_") and path.partition(".")[0] not in RECORDS:
                    yield Method(path, argument)


def group() -> td.TableGroup:
    """Two tables that keep all that methods ask for."""
    policy = td.Policy(score=("custom", "frequency"), admission=td.AdmitFrequent(2))
    tables = [td.TableConfig(name, 4, policy=policy) for name in ("ads", "users")]
    made = td.TableGroup(
        tables, optimizer=td.SGD(lr=0.1), seed=1, device=torch.get_default_device()
    )
    made.scores.set_batch(0, 1)
    made.scores.set_batch(1, 1)
    made.insert_or_assign(1, IDS, ROWS)
    return made


METHODS = sorted(methods())


def called(path: str, argument: str, table: int | str) -> Any:
    """Call a method of a new group; return its result and all sizes afterwards."""
    made = group()
    call: Callable[..., Any] = made
    for part in path.split("."):
        call = getattr(call, part)
    if argument == "feature_tables":
        result = call(IDS, torch.tensor([0, 3]), [table])
    else:
        options = dict(OPTIONS.get(path, {}))
        if "generator" in options:
            options["generator"] = torch.Generator(made.device).manual_seed(0)
        result = call(table, *ARGUMENTS.get(path, ()), **options)
    if isinstance(result, Iterator):
        result = list(result)
    state = {name: made.read(name, IDS) for name in made.names}
    return result, made.sizes(), state


def test_the_walk_finds_the_methods() -> None:
    paths = {path for path, _ in METHODS}
    assert {"find", "find_or_insert", "prefetch", "insert", "fill", "export", "scores.get"} <= paths
    assert ARGUMENTS.keys() <= paths
    assert OPTIONS.keys() <= paths


@pytest.mark.parametrize(("path", "argument"), METHODS)
def test_a_table_is_named_or_numbered(path: str, argument: str) -> None:
    if path == "add_table":
        return  # it takes the config of a new table
    named, numbered = (called(path, argument, table) for table in ("users", 1))
    assert repr(named) == repr(numbered)
    with pytest.raises(ValueError, match=r"table is 'user', expected one of \['ads', 'users'\]"):
        called(path, argument, "user")
    with pytest.raises(TypeError, match=r"table is 1\.5, expected the name of a table, str"):
        called(path, argument, 1.5)  # type: ignore[arg-type]


def test_calls_that_insert_do_what_the_faq_says() -> None:
    """Its table: which call gives an unknown id a row, and which value the row has."""
    made = group()
    new, initial = torch.tensor([9]), made.read("ads", torch.tensor([9]))
    bounds = torch.tensor([0, 1])
    made.contains("ads", new)
    assert int(made.find(new, bounds, ["ads"]).handles) < 0
    made.fill("ads", 2.0)
    made.materialize()
    assert made.size("ads") == 0
    for times in (0, 1):  # the policy admits an id when it comes for the second time
        assert (int(made.insert("ads", new, scores=new)) >= 0) == bool(times)
    assert torch.equal(made.read("ads", new), initial)
    made.fill("ads", 2.0)
    assert made.read("ads", new).tolist() == [[2.0] * 4]
    two, offsets = torch.tensor([9, 8]), torch.tensor([0, 1, 2])
    found = made.find_or_insert(two, offsets, ["ads", "users"], scores=two)
    assert (found >= 0).tolist() == [True, False]
    made.insert_or_assign("users", torch.tensor([8, 1]), 3 * ROWS[:2])
    assert made.read("users", torch.tensor([8, 1, 2])).tolist() == [[3.0] * 4] * 2 + [[1.0] * 4]
    assert made.materialize() == 0
