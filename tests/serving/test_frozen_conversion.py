"""to(), half() and their kin of frozen models: what lookups return, and what stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from seeding import seeded
from torch import Tensor, nn

import torch_dynemb as td

pytestmark = pytest.mark.any_device

IDS = torch.randint(0, 50, (20, 3), generator=seeded(0))
SGD = td.SGD(lr=0.1)


class Model(nn.Module):
    """All kinds of tables, rows of bfloat16 among them, under a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = td.DynamicEmbedding(4, name="user", optimizer=SGD)
        self.ad = td.DynamicEmbeddingBag(
            4, name="ad", optimizer=SGD, dtype=torch.bfloat16, mode="mean"
        )
        self.bags = td.DynamicEmbeddingBagCollection([td.TableConfig("shown", 4)], optimizer=SGD)
        self.rows = td.DynamicEmbeddingCollection([td.TableConfig("item", 4)], optimizer=SGD)
        self.dense = nn.Linear(4, 2)

    def lookups(self, ids: Tensor) -> list[Tensor]:
        return [
            self.user(ids).sum(1),
            self.ad(ids),
            self.bags({"shown": ids}),
            self.rows({"item": ids})["item"].sum(1),
        ]

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.dense(torch.stack(self.lookups(ids)).sum(0))
        return result


def trained() -> Model:
    model = Model()
    model(IDS).square().sum().backward()
    return model


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "half": (lambda model: model.half(), torch.float16),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
    "to": (lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "float again": (lambda model: model.half().float(), torch.float32),
    "double": (lambda model: model.double(), torch.float64),
}


@pytest.mark.parametrize(("convert", "dtype"), CONVERSIONS.values(), ids=list(CONVERSIONS))
def test_lookups_return_another_dtype(
    convert: Callable[[nn.Module], nn.Module], dtype: torch.dtype
) -> None:
    model = trained()
    frozen = td.freeze(model)
    expected = frozen.user(IDS), frozen.ad(IDS)
    tables = {name: t.clone() for name, t in frozen.state_dict().items() if "frozen" in name}
    assert convert(frozen) is frozen
    assert frozen(IDS).dtype == frozen.dense.weight.dtype == dtype
    assert all(part.dtype == dtype for part in frozen.lookups(IDS))
    # rounded once: sums and means are made of the rows as they were
    assert torch.equal(frozen.user(IDS), expected[0].to(dtype))
    assert torch.equal(frozen.ad(IDS), expected[1].to(dtype))
    after = frozen.state_dict()
    for name, before in tables.items():
        assert after[name].dtype == before.dtype
        assert torch.equal(after[name], before)


def test_converted_models_are_ordinary_modules() -> None:
    frozen = td.freeze(trained()).half()
    expected = frozen(IDS)
    assert torch.equal(copy.deepcopy(frozen)(IDS), expected)
    other = td.freeze(Model()).half()
    with pytest.raises(RuntimeError, match=r"'weights0' is .* \(35, 4\), expected"):
        other.load_state_dict(frozen.state_dict())  # of more ids
    again = td.freeze(trained()).half()
    again.load_state_dict(frozen.state_dict())
    assert torch.equal(again(IDS), expected)


def test_modules_that_move_keep_their_dtype() -> None:
    model = trained()
    frozen = td.freeze(model)
    expected = frozen(IDS)
    frozen.to(IDS.device, torch.float32)
    frozen.share_memory()
    assert all(buffer.is_shared() for buffer in frozen.buffers())
    assert torch.equal(frozen(IDS), expected)


@pytest.mark.long
@pytest.mark.traced
@pytest.mark.parametrize("strict", [False, True])
def test_converted_models_are_exported(strict: bool) -> None:
    frozen = td.freeze(trained()).to(torch.bfloat16)
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    program = torch.export.export(frozen, (IDS,), dynamic_shapes=shapes, strict=strict)
    for ids in (IDS, IDS[:1], IDS[:0], IDS.repeat(1, 2) + 30):
        assert torch.equal(program.module()(ids), frozen(ids))
