"""Frozen modules in torch.jit.trace, on batches of other sizes than the example's.

A trace keeps integers other than sizes of tensors; each result here is that of the module itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from seeding import seeded
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.nn.features import KeyedJagged

pytestmark = [
    pytest.mark.cpu_only("the CPU's ids and offsets are made by other ops than a GPU's"),
    pytest.mark.traced,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # checks of arguments look at sizes of the example
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

NAMES = ["a", "b", "c"]


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 60, shape, generator=seeded(seed))


def ragged(bags: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ids, and where each bag begins and the last one ends."""
    lengths = torch.randint(0, 4, (bags,), generator=seeded(seed))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return random_ids(int(offsets[-1]), seed=seed), offsets


def weights_of(ids: Tensor) -> Tensor:
    return torch.rand(ids.shape, generator=seeded(7))


def trained_bag(**options: Any) -> td.DynamicEmbeddingBag:
    bag = td.DynamicEmbeddingBag(4, mode="mean", optimizer=td.SGD(lr=0.1), **options)
    bag(torch.arange(40).reshape(8, 5)).sum().backward()
    return bag


def rectangles(batch: int) -> tuple[Tensor, ...]:
    return (random_ids(batch, 2 + batch % 3),)


def begins(batch: int) -> tuple[Tensor, ...]:
    ids, offsets = ragged(batch, batch)
    return ids, offsets[:-1]


def weighted_begins(batch: int) -> tuple[Tensor, ...]:
    ids, offsets = ragged(batch, batch)
    return ids, offsets[:-1], weights_of(ids)


def narrow_begins(batch: int) -> tuple[Tensor, ...]:
    ids, offsets = begins(batch)
    return ids.int(), offsets.int()


def narrow_bounds(batch: int) -> tuple[Tensor, ...]:
    ids, offsets = ragged(batch, batch)
    return ids.int(), offsets.int()


BAGS: list[tuple[Callable[[int], tuple[Any, ...]], dict[str, Any]]] = [
    (rectangles, {}),
    (begins, {}),
    (weighted_begins, {}),
    (narrow_begins, {}),
    (narrow_bounds, {"include_last_offset": True}),
]


def assert_dynamic(
    model: nn.Module, arguments: Callable[[int], tuple[Any, ...]], strict: bool = True
) -> None:
    """A trace of three samples gives of any batch what the model gives."""
    traced = torch.jit.trace(model, arguments(3), strict=strict)
    for batch in (0, 1, 2, 17):
        given = arguments(batch)
        torch.testing.assert_close(traced(*given), model(*given), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [None, "int8"])
@pytest.mark.parametrize(("arguments", "options"), BAGS)
def test_bags(
    arguments: Callable[[int], tuple[Any, ...]], options: dict[str, Any], rows: Any
) -> None:
    assert_dynamic(td.freeze(trained_bag(**options), rows=rows), arguments)


def test_wrong_offsets_are_refused() -> None:
    traced = torch.jit.trace(td.freeze(trained_bag()), narrow_begins(3))
    for offsets in ([1, 2], [0, 5, 3], [0, 99]):
        with pytest.raises(RuntimeError, match=r"serve_lookup: (the last offset|offsets\[)"):
            traced(random_ids(6).int(), torch.tensor(offsets).int())


def frozen_bags() -> nn.Module:
    bags = td.DynamicEmbeddingBagCollection(
        [td.TableConfig(name, 4) for name in NAMES], optimizer=td.SGD(lr=0.1)
    )
    bags(even_features(9)[0]).sum().backward()
    return td.freeze(bags)


def even_features(batch: int) -> tuple[dict[str, Tensor]]:
    return ({name: random_ids(batch, 2 + i, seed=i) for i, name in enumerate(NAMES)},)


def ragged_features(batch: int) -> tuple[dict[str, Any]]:
    return ({name: ragged(batch, i) for i, name in enumerate(NAMES)},)


@pytest.mark.parametrize("arguments", [even_features, ragged_features])
def test_collections(arguments: Callable[[int], tuple[Any, ...]]) -> None:
    assert_dynamic(frozen_bags(), arguments)


def test_features_of_different_batches_are_refused() -> None:
    model = frozen_bags()
    for arguments in (even_features, ragged_features):
        traced = torch.jit.trace(model, arguments(3))
        for batch in (3, 5):
            given = arguments(4)[0] | {"b": arguments(batch)[0]["b"]}
            with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
                traced(given)
    ids, offsets = ragged(4, 0)
    for wrong in (offsets + 1, offsets - (offsets == offsets[-1]).long()):
        with pytest.raises(RuntimeError, match="serve_lookup: "):
            traced(ragged_features(4)[0] | {"a": (ids, wrong)})


@pytest.mark.parametrize("keys", [NAMES, ["b", "c", "a"], ["b", "c", "other", "a"]])
def test_keyed_bags(keys: list[str]) -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = frozen_bags()

        def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor) -> Any:
            return self.bags(KeyedJagged(keys, ids, offsets, weights))

    def arguments(batch: int) -> tuple[Tensor, ...]:
        ids, offsets = ragged(batch * len(keys), batch)
        return ids, offsets, weights_of(ids)

    assert_dynamic(Keyed(), arguments)


def test_sequences() -> None:
    def arguments(batch: int) -> tuple[dict[str, Tensor]]:
        shapes = {"a": (batch,), "b": (batch, 3), "c": (batch, 2, batch)}
        return ({name: random_ids(*shape, seed=batch) for name, shape in shapes.items()},)

    rows = td.DynamicEmbeddingCollection(
        [td.TableConfig(name, 4) for name in NAMES], optimizer=td.SGD(lr=0.1)
    )
    torch.cat([of.reshape(-1) for of in rows(arguments(9)[0]).values()]).sum().backward()
    assert_dynamic(td.freeze(rows), arguments, strict=False)


def test_missing_ids_are_counted() -> None:
    assert_dynamic(td.freeze(trained_bag(), missing=True), rectangles)
