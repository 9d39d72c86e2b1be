"""The registry of modules: what a class made from a registered one has, and wrong registrations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.nn import RowOptimizers
from torch_dynemb.parts.table_parts import parts_of

pytestmark = pytest.mark.cpu_only("looks at modules")


class Items(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.group = td.TableGroup([td.TableConfig("items", 4)], optimizer=td.SGD(lr=0.1))


class Trained(nn.Module):
    """Has a table in an attribute that no walk over modules finds."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), split=True)]


class MoreItems(Items):
    pass


class Other(nn.Module):
    pass


class FrozenItems(nn.Module):
    def __init__(self, source: Items, choices: td.serving.Choices) -> None:
        super().__init__()
        self.rows: Tensor = source.group.read(0, torch.arange(3))


def tables(module: Items, path: str) -> Iterator[td.checkpoint.TablePart]:
    yield td.checkpoint.TablePart(path, module.group, 0, embedding_dim=4)


td.register_module(Items, tables=tables)
td.register_module(Items, frozen=FrozenItems)


def test_classes_made_from_a_registered_one_are_known() -> None:
    model = nn.ModuleDict({"a": Items(), "b": MoreItems()})
    assert [part.name for part in parts_of(model)] == ["a", "b"]
    assert isinstance(td.freeze(model)["b"], FrozenItems)


def test_registered_optimizers_are_stepped_and_clipped() -> None:
    class Own(Trained):
        pass

    model = nn.Sequential(Own(), nn.Linear(4, 1))
    assert td.table_optimizers(model) == []
    td.register_module(Own, optimizers=lambda module: RowOptimizers([module.tables[0].optimizer]))
    table = model[0].tables[0]
    assert td.table_optimizers(model) == [table.optimizer]
    table(torch.tensor([7])).backward(torch.full((1, 4), 2.0))
    assert td.clip_grad_norm_(model, 1.0).item() == 4.0


def test_wrong_registrations_change_nothing() -> None:
    class Own(Items):
        pass

    td.register_module(Own, tables=tables)
    with pytest.raises(ValueError, match=r"register_module: tables of Own is .* already"):
        td.register_module(Own, tables=tables, follower=Other)
    td.register_module(Own, follower=Other)
    with pytest.raises(ValueError, match="nothing is given for Other, expected tables, frozen"):
        td.register_module(Other)
    with pytest.raises(TypeError, match=r"kind is .*Other.*, expected a class of modules"):
        td.register_module(Other(), tables=tables)  # type: ignore[arg-type]
