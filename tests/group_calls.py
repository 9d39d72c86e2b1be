"""Calls on a TableGroup as tests write them: bags of ids by feature, in lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from torch_dynemb import TableGroup, ops
from torch_dynemb.ops.columns import BUCKET_WIDTH, FREE_STEP, Pooling

Feature = tuple[int, Sequence[Sequence[int]]]  # table, bags


class Call(NamedTuple):
    """The arguments that all lookups share."""

    ids: Tensor
    offsets: Tensor
    tables: list[int]
    dims: list[int]

    def batch(
        self, pooling: Pooling = Pooling.SUM, weights: Tensor | None = None
    ) -> ops.LookupBatch:
        """What ops that read rows take."""
        return ops.LookupBatch(self.ids, self.offsets, weights, self.tables, self.dims, pooling)


def call_of(group: TableGroup, features: Sequence[Feature]) -> Call:
    """All features have the same number of bags."""
    bags = [list(bag) for _, bags in features for bag in bags]
    ids = torch.tensor([id for bag in bags for id in bag], dtype=torch.int64)
    lengths = torch.tensor([0] + [len(bag) for bag in bags])
    tables = [table for table, _ in features]
    dims = [group.config.tables[table].embedding_dim for table in tables]
    return Call(ids, lengths.cumsum(0), tables, dims)


def flat_call(group: TableGroup, table: int, ids: Tensor) -> Call:
    """One bag per id."""
    dim = group.config.tables[table].embedding_dim
    return Call(ids, torch.arange(ids.numel() + 1), [table], [dim])


def bag_lookup(
    group: TableGroup,
    call: Call,
    *,
    handles: Tensor | None = None,
    pooling: Pooling = Pooling.SUM,
    weights: Tensor | None = None,
    optimizer: int | None = None,
) -> Tensor:
    """Differentiable pooled lookup; inserts ids unless it is given handles."""
    if handles is None:
        handles = group.find_or_insert(call.ids, call.offsets, call.tables)
    return ops.embedding(
        group.rows,
        call.batch(pooling, weights),
        handles,
        torch.zeros(1, requires_grad=True),
        optimizer=group.config.optimizer_code if optimizer is None else optimizer,
    )


def read_bags(
    group: TableGroup,
    call: Call,
    *,
    handles: Tensor | None = None,
    pooling: Pooling = Pooling.SUM,
    weights: Tensor | None = None,
) -> Tensor:
    """Pooled lookup that inserts nothing."""
    if handles is None:
        handles = group.find(call.ids, call.offsets, call.tables).handles
    return ops.embedding_inference(group.rows, call.batch(pooling, weights), handles)


def train(group: TableGroup, table: int, ids: Tensor, gradient: Tensor) -> None:
    """Looks up one bag per id and runs its backward; gradient is float32 [n, dim]."""
    bag_lookup(group, flat_call(group, table, ids)).backward(gradient)


def take_rows(group: TableGroup, table: int, ids: Tensor) -> None:
    """Gives rows free as an eviction does: pending gradients of the ids stay, with old handles."""
    ops.erase_(group.index, ids, torch.tensor([0, ids.numel()], device=ids.device), [table])


def snapshot(group: TableGroup) -> dict[str, Tensor]:
    """Copies of all state, reserved parts too: for groups with a small max_rows."""
    tensors = {
        name: getattr(group.index, name)
        for name in ("buckets", "scores", "tables", "slabs", "free_rows", "clock")
    }
    tensors |= {
        "row_clock": group.rows.row_clock,
        "hyper": group.rows.hyper,
        "meta": group.index.meta,
    }
    for name in ("weights", "generations", "state", "pending"):
        tensors |= {f"{name}[{i}]": tensor for i, tensor in enumerate(getattr(group.rows, name))}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not equal bit for bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not same_bits(a[name], b[name])]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of shape and bits, so that NaN equals itself and -0.0 differs from 0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point:
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))
    return torch.equal(a, b)


def with_free_steps(scores: Tensor) -> Tensor:
    """A copy of the scores of buckets in which slots that an id has left have step 0.

    The CPU writes ``FREE_STEP`` there and a GPU 0, which mean the same.
    """
    scores = scores.clone()
    steps = scores[:, :BUCKET_WIDTH]
    steps[steps == FREE_STEP] = 0
    return scores


@contextmanager
def raises_in_step(group: TableGroup, match: str) -> Iterator[None]:
    """Expects RuntimeError: at once on the CPU, by the end of the step on a GPU."""
    with pytest.raises(RuntimeError, match=match):  # noqa: PT012 -- either may raise
        yield
        group.end_step()


def unchanged(group: TableGroup, call: Callable[[], object]) -> list[str]:
    """Runs a call that is expected to raise; names what it changed, in spite of that.

    A GPU may report by the end of the step.
    """
    before = snapshot(group)
    try:
        call()
        group.end_step()
    except (RuntimeError, ValueError, TypeError):
        return differences(before, snapshot(group))
    raise AssertionError("the call did not raise")
