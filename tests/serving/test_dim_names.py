"""Errors of packages call dynamic sizes as the user did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import torch_dynemb as td
from torch_dynemb.nn.features import KeyedJagged
from torch_dynemb.serving.packages.dim_names import dim_names
from torch_dynemb.serving.packages.inputs import (
    Input,
    input_tensors,
    inputs_of,
    outputs_of,
    shape_text,
)

pytestmark = [pytest.mark.cpu_only("programs are the same on any device"), pytest.mark.traced]


class Bags(nn.Module):
    """Ids in a dict, as they come from a data loader, beside dense values."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = td.freeze(td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1)))

    def forward(self, features: dict[str, Any], dense: Tensor) -> Tensor:
        ragged: Tensor = self.bag(*features["ragged"])
        even: Tensor = self.bag(features["even"])
        return ragged + even + dense


BATCH, LENGTH, IDS = Dim("batch", min=0), Dim("length"), Dim("ids", max=1000)
EXAMPLE = (
    {"ragged": (torch.arange(7), torch.tensor([0, 2, 4])), "even": torch.ones(3, 2).long()},
    torch.ones(3, 4),
)
OF_FEATURES = {"even": {0: BATCH, 1: LENGTH}, "ragged": ({0: IDS}, {0: BATCH})}


def taken(model: nn.Module, inputs: tuple[Any, ...], shapes: Any) -> list[Input]:
    program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    return inputs_of(program, dim_names(program, model.forward, inputs, shapes))


@pytest.mark.parametrize(
    "shapes",
    [(OF_FEATURES, {0: BATCH}), {"dense": [BATCH, None], "features": OF_FEATURES}],
    ids=["positions", "names"],
)
def test_sizes_have_the_names_of_their_dims(shapes: Any) -> None:
    inputs = taken(Bags(), EXAMPLE, shapes)
    assert [shape_text(of.sizes) for of in inputs] == [
        "(ids [<= 1000])",
        "(batch)",
        "(batch, length)",
        "(batch, 4)",
    ]
    ids, offsets, even, dense = torch.utils._pytree.tree_leaves(EXAMPLE)
    with pytest.raises(
        ValueError, match=r"'dense' has shape \(2, 4\), expected \(batch, 4\)"
    ) as of:
        input_tensors(inputs, [ids, offsets, even, dense[:2]], torch.device("cpu"))
    assert "where ids is 7 by now, where batch is 3 by now" in str(of.value)


def test_sizes_that_are_computed_from_a_dim_have_its_name() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tables = [td.TableConfig(name, 4) for name in "ab"]
            self.bags = td.freeze(
                td.DynamicEmbeddingBagCollection(tables, optimizer=td.SGD(lr=0.1))
            )

        def forward(self, features: KeyedJagged) -> Any:
            return self.bags(features)

    jagged = KeyedJagged(["a", "b"], torch.arange(7), torch.tensor([0, 2, 4, 5, 7]))
    with td.nn.features.exports_for_compiled_code():
        inputs = taken(Keyed(), (jagged,), ([{0: IDS}, {0: 2 * BATCH + 1}, None],))
    assert [shape_text(of.sizes) for of in inputs][:2] == ["(ids [<= 1000])", "(2 * batch + 1)"]


def test_sizes_without_a_name_have_that_of_their_place() -> None:
    shapes = {"even": {0: Dim.AUTO, 1: LENGTH}, "ragged": ({0: Dim.AUTO}, {0: Dim.AUTO})}
    inputs = taken(Bags(), EXAMPLE, (shapes, {0: Dim.AUTO}))
    ids, offsets, even, dense = (of.name for of in inputs)
    assert [shape_text(of.sizes) for of in inputs] == [
        f"({ids}.shape[0])",
        f"({offsets}.shape[0])",
        f"({offsets}.shape[0], length)",
        f"({offsets}.shape[0], 4)",
    ]
    assert (even, dense) == ("features_even", "dense")


def test_sizes_that_are_computed_from_one_without_a_name_have_its_place() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + torch.cat([y, y])

    inputs = taken(Twice(), (torch.ones(6), torch.ones(3)), ({0: Dim.AUTO}, {0: Dim.AUTO}))
    assert [shape_text(of.sizes) for of in inputs] == ["(2 * y.shape[0])", "(y.shape[0])"]


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (lambda x: x + 1, ["output"]),
        (lambda x: (x + 1, x > 0), ["output_0", "output_1"]),
        (lambda x: {"score": x + 1, "top": [x[:, 0], x > 0]}, ["score", "top_0", "top_1"]),
        (lambda x: [{"a": x + 1}, None, x > 0], ["output_0_a", "output_2"]),
        (lambda x: {"a_0": x + 1, "a": [x > 0]}, ["output_0", "output_1"]),  # else one name twice
    ],
)
def test_outputs_have_the_names_of_their_paths(answer: Any, names: list[str]) -> None:
    class Answers(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return answer(x)

    inputs, shapes = (torch.ones(3, 4),), ({0: BATCH},)
    program = torch.export.export(Answers(), inputs, dynamic_shapes=shapes)
    named = dim_names(program, Answers().forward, inputs, shapes)
    outputs = outputs_of(program, named, counted=False)
    assert [of.name for of in outputs] == names
    assert shape_text(outputs[0].sizes) == "(batch, 4)"
    assert [of.dtype for of in outputs][-1] == (torch.bool if len(names) > 1 else torch.float32)
