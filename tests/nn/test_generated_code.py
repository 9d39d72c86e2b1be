"""The code that Inductor generates for a training step touches no more of a table than the batch.

Tables have far more rows than the batch has ids, and a row count that nothing else shares, so every
allocation, copy or loop of table size shows up in the generated code as a number.
"""

from __future__ import annotations

import pytest
import torch
from generated_code import ROWS, generated_code, table_sized_lines
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("compilers and their view of ops")

DIM = 8


def make_bag(optimizer: td.optim.OptimizerConfig) -> td.DynamicEmbeddingBag:
    return td.DynamicEmbeddingBag(
        DIM, mode="sum", optimizer=optimizer, max_rows=ROWS, policy=td.Policy(score="step")
    )


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [td.SGD(lr=0.1), td.Adam(lr=0.1)], ids=["sgd", "adam"])
def test_bag_step_is_batch_sized(optimizer: td.optim.OptimizerConfig) -> None:
    bag = make_bag(optimizer)
    dense = torch.nn.Linear(DIM, 2)
    code = generated_code(lambda ids: dense(bag(ids)))
    assert "dynemb.find_or_insert_" in code
    assert "dynemb.embedding_forward" in code
    assert "dynemb.embedding_backward_" in code
    assert table_sized_lines(code) == []


@pytest.mark.long
def test_split_step_is_batch_sized() -> None:
    """Check two lookups of a table with waiting gradients, rows below float32 and 8-bit state."""
    table = td.DynamicEmbedding(
        DIM,
        optimizer=td.Adam(lr=0.1, state_dtype=torch.uint8),
        dtype=torch.bfloat16,
        output_dtype=torch.bfloat16,
        split=True,
        max_rows=ROWS,
    )
    code = generated_code(lambda ids: table(ids) * table(ids + 1))
    assert code.count("torch.ops.dynemb.accumulate_grad_.default(") == 2
    assert "_backward_" not in code
    assert table_sized_lines(code) == []


@pytest.mark.long
def test_collection_step_is_batch_sized() -> None:
    tables = [td.TableConfig(f"t{i}", DIM * (1 + i % 2), [f"f{i}"]) for i in range(4)]
    collection = td.DynamicEmbeddingBagCollection(
        tables, optimizer=td.RowWiseAdagrad(lr=0.1), max_rows=ROWS
    )
    code = generated_code(lambda ids: collection({f"f{i}": ids + i for i in range(4)}))
    assert code.count("torch.ops.dynemb.find_or_insert_.default(") == 1
    assert table_sized_lines(code) == []


@pytest.mark.long
def test_weighted_step_of_any_batch_size_is_batch_sized() -> None:
    bag = make_bag(td.Adagrad(lr=0.1))
    factor = torch.nn.Parameter(torch.ones(3))
    code = generated_code(
        lambda ids: bag(ids, per_sample_weights=factor.expand(ids.shape)), dynamic=True
    )
    assert "dynemb.bag_weight_grad" in code
    assert table_sized_lines(code) == []


@pytest.mark.long
def test_checkpointed_step_is_batch_sized() -> None:
    """The lookup is computed again in the backward, the insertion is not."""
    table = td.DynamicEmbedding(DIM, optimizer=td.Adam(lr=0.1), max_rows=ROWS)
    dense = torch.nn.Linear(DIM, 2)

    def body(ids: Tensor) -> Tensor:
        return dense(table(ids).tanh())

    code = generated_code(lambda ids: checkpoint(body, ids, use_reentrant=False))
    assert code.count("torch.ops.dynemb.find_or_insert_.default(") == 1
    assert code.count("torch.ops.dynemb.embedding_forward.default(") == 2
    assert table_sized_lines(code) == []


# Ops and models that are wrong on purpose: the scan must find their table-sized work.


@torch.library.custom_op("generated_code_test::touch_", mutates_args={"weights"})
def touch_(weights: Tensor, ids: Tensor) -> Tensor:
    weights[0] += 1
    return ids.clone()


@touch_.register_fake
def _(weights: Tensor, ids: Tensor) -> Tensor:
    return torch.empty_like(ids)


@pytest.mark.long
def test_scan_finds_rows_changed_in_forward_and_backward() -> None:
    """What DynamicEmbedding would cost if insertion wrote rows."""
    bag = make_bag(td.SGD(lr=0.1))

    def step(ids: Tensor) -> Tensor:
        return bag(torch.ops.generated_code_test.touch_(bag.group.rows.weights[0], ids))

    assert table_sized_lines(generated_code(step)) != []


@pytest.mark.long
def test_scan_finds_functional_update() -> None:
    weights = torch.zeros(ROWS, DIM)
    scale = torch.nn.Parameter(torch.ones(1))

    def step(ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        updated = weights.index_add(0, flat, torch.ones(flat.shape[0], DIM))
        weights.copy_(updated)
        return updated[flat] * scale

    assert table_sized_lines(generated_code(step)) != []
