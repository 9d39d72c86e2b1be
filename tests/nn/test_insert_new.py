"""Rows of new ids from a function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import recis

pytestmark = pytest.mark.any_device


def content(ids: Tensor) -> Tensor:
    """Rows that say which id they are of."""
    return torch.stack([ids, -ids, ids + 1, ids * 2], 1).double()


def items(**options: Any) -> td.DynamicEmbedding:
    module = td.DynamicEmbedding(
        4, name="items", optimizer=td.SGD(lr=0.5), padding_idx=0, **options
    )
    module(torch.tensor([1, 2])).sum().backward()
    module.optimizer.step()
    return module


def test_new_ids_begin_with_the_rows_of_the_function() -> None:
    module = items()
    known = module.group.read(0, torch.tensor([1, 2]))
    asked: list[list[int]] = []

    def rows_of(ids: Tensor) -> Tensor:
        asked.append(sorted(ids.tolist()))
        return content(ids)

    batch = torch.tensor([[7, 1, 0], [7, -(2**40), 2]])
    assert td.insert_new(module, "items", batch, rows_of) == 2
    assert td.insert_new(module, "items", batch, rows_of) == 0
    assert td.insert_new(module, "items", torch.tensor([0, 1]), rows_of) == 0
    assert asked == [[-(2**40), 7]]
    module.eval()
    expected = content(batch.flatten()).float()
    expected[batch.flatten() == 0] = 0.0
    expected[batch.flatten() == 1], expected[batch.flatten() == 2] = known[0], known[1]
    assert torch.equal(module(batch), expected.view(2, 3, 4))
    module.train()
    module(torch.tensor([7])).sum().backward()  # the gradient goes on from there
    assert torch.equal(module.group.read(0, torch.tensor([7])), content(torch.tensor([7])) - 0.5)


def test_the_table_of_a_model_by_name() -> None:
    configs = [td.TableConfig(name, 4) for name in ("users", "items")]
    model = nn.ModuleDict(
        {
            "left": td.DynamicEmbeddingCollection(configs, optimizer=td.SGD(lr=0.1)),
            "right": td.DynamicEmbeddingCollection(configs[:1], optimizer=td.SGD(lr=0.1)),
        }
    )
    ids = torch.arange(5)
    assert td.insert_new(model, "items", ids, content) == 5
    assert td.insert_new(model, "right.users", ids[:2], content) == 2
    assert model["left"].group.sizes() == {"users": 0, "items": 5}  # type: ignore[union-attr, operator]
    assert model["right"].group.sizes() == {"users": 2}  # type: ignore[union-attr, operator]
    several = r"table is 'users', the name of \['left.users', 'right.users'\], expected that of one"
    with pytest.raises(ValueError, match=several):
        td.insert_new(model, "users", ids, content)
    with pytest.raises(ValueError, match="table is 'usres', the name of no table, expected that"):
        td.insert_new(model, "usres", ids, content)


def test_errors_leave_the_table_as_it_is() -> None:
    module, ids = items(), torch.tensor([1, 8, 9])
    with pytest.raises(ValueError, match=r"rows_of returned shape \(2, 3\), expected \(2, 4\), a"):
        td.insert_new(module, "items", ids, lambda new: torch.ones(len(new), 3))
    with pytest.raises(TypeError, match="the result of rows_of is None, expected a float Tensor"):
        td.insert_new(module, "items", ids, lambda new: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        td.insert_new(module, "items", ids, lambda new: content(new) / (1 // 0))
    assert len(module) == 2
    full = items(policy=td.Policy(score="step", capacity=3, on_full="error"))
    with pytest.raises(td.errors.NoRoomError, match="has 2 ids and room for 1 more"):
        td.insert_new(full, "items", torch.arange(1, 9), content)
    assert len(full) == 2
    option = recis.EmbeddingOption(embedding_dim=4, shared_name="users", dtype=torch.int8)
    engine = recis.EmbeddingEngine({"users": option})
    with pytest.raises(NotImplementedError, match="table 'users' has packed rows, but columns of"):
        td.insert_new(engine, "users", ids, content)


@pytest.mark.traced
def test_compiled_code_is_refused() -> None:
    module, ids = items(), torch.tensor([8])

    @torch.compile(backend="eager", fullgraph=True)
    def step(ids: Tensor) -> Tensor:
        td.insert_new(module, "items", ids, content)
        return module(ids)

    with pytest.raises(Exception, match="call it before the compiled step"):
        step(ids)
    assert 8 not in module
