"""Programs that torch.export makes of frozen collections take any number of samples and ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.fx.experimental import _config as config

import torch_dynemb as td

pytestmark = [pytest.mark.any_device, pytest.mark.traced]

NAMES = ["a", "b", "c"]
SGD = td.SGD(lr=0.1)


def keyed(keys: list[str], weighted: bool = False) -> Callable[[int], Any]:
    """Makes ragged batches of features."""

    def batch(samples: int) -> td.KeyedJagged:
        lengths = (torch.arange(len(keys) * samples) + samples) % 3
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        ids = torch.arange(int(offsets[-1])) % 11
        return td.KeyedJagged(keys, ids, offsets, ids.float() + 0.5 if weighted else None)

    return batch


def ragged(samples: int) -> dict[str, Any]:
    offsets = torch.arange(samples + 1) * 2
    return {name: (torch.arange(2 * samples) % (5 + n), offsets) for n, name in enumerate(NAMES)}


def sequences(samples: int) -> dict[str, Any]:
    return {name: torch.arange(2 * samples).reshape(samples, 2) % 9 for name in NAMES}


def shapes_of(features: Any) -> Any:
    """Of any sizes; a keyed jagged input stands for the list of its tensors."""
    if features is None:
        return None
    if isinstance(features, td.KeyedJagged):
        parts = (features.values(), features.offsets(), features.weights_or_none())
        return [shapes_of(part) for part in parts]
    if isinstance(features, dict):
        return {name: shapes_of(part) for name, part in features.items()}
    if isinstance(features, tuple):
        return tuple(shapes_of(part) for part in features)
    return {0: Dim.AUTO}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "batch",
    [keyed(NAMES, True), keyed(["c", "a", "b"]), keyed(["x", "c", "a", "b"]), ragged, sequences],
    ids=["keyed", "in another order", "with others", "ragged", "sequences"],
)
def test_any_batch(batch: Callable[[int], Any], strict: bool) -> None:
    tables = [td.TableConfig(name, 4) for name in NAMES]
    kind = td.DynamicEmbeddingCollection if batch is sequences else td.DynamicEmbeddingBagCollection
    live = kind(tables, optimizer=SGD)
    live(batch(3))
    example = batch(4)
    program = torch.export.export(
        td.freeze(live), (example,), dynamic_shapes=(shapes_of(example),), strict=strict
    ).module()
    live.eval()
    for samples in (0, 1, 2, 9):
        output, expected = program(batch(samples)), live(batch(samples))
        if not isinstance(expected, dict):
            output, expected = {"": output}, {"": expected}
        assert list(output) == list(expected)
        assert all(torch.equal(output[name], of) for name, of in expected.items())


class Beside(nn.Module):
    """Bags beside an input that has as many samples."""

    def __init__(self) -> None:
        super().__init__()
        tables = [td.TableConfig(name, 4) for name in NAMES]
        self.bags = td.DynamicEmbeddingBagCollection(tables, optimizer=SGD)

    def forward(self, dense: torch.Tensor, features: Any) -> torch.Tensor:
        return torch.cat([dense, self.bags(features)], 1)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("batch", [keyed(NAMES), ragged, sequences])
def test_beside_other_inputs(batch: Callable[[int], Any], strict: bool) -> None:
    live = Beside()
    example = torch.rand(4, 2), batch(4)
    live(*example)
    with config.patch(backed_size_oblivious=batch is not sequences):
        shapes = ({0: Dim.AUTO}, shapes_of(example[1]))
        program = torch.export.export(
            td.freeze(live), example, dynamic_shapes=shapes, strict=strict
        ).module()
    live.eval()
    for samples in (0, 1, 2, 9):
        given = torch.rand(samples, 2), batch(samples)
        assert torch.equal(program(*given), live(*given))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("last", [False, True], ids=["begins", "with the last offset"])
def test_any_bags(strict: bool, last: bool) -> None:
    live = td.DynamicEmbeddingBag(4, mode="sum", include_last_offset=last, optimizer=SGD)

    def bags(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        offsets = torch.arange(count + 1) * 2
        return torch.arange(2 * count) % 7, offsets if last else offsets[:-1].clone()

    live(*bags(3))
    example = bags(4)
    program = torch.export.export(
        td.freeze(live), example, dynamic_shapes=shapes_of(example), strict=strict
    ).module()
    live.eval()
    for count in (0, 1, 2, 9):
        assert torch.equal(program(*bags(count)), live(*bags(count)))
