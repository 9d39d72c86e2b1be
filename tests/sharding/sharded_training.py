"""Trains a sharded model and its unsharded oracle side by side, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from jagged_batches import OTHER_VBE, Batch, batches_of_ranks, keyed_jagged
from seeding import seeded
from sharded_models import Table, kernels, output_names, sharded
from torch import Tensor
from torchrec.optim.optimizers import in_backward_optimizer_filter
from uneven_gather import uneven_gather
from unsharded_oracle import Oracle, rows_by_id

import torch_dynemb as td

STEPS = 3
UNEVEN = ("variable_batch", "empty_rank", "vbe", "weighted_vbe", *OTHER_VBE)
ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        kind: of features; see jagged_batches.
        fused_params: of the sharders.
        optimizer: of the oracle.
        sharder_optimizer: of the sharders.
        vocabulary: of ids; None: all int64.
        ends_steps: calls ``step()`` of the fused optimizer.
        tolerance: of outputs and rows.
    """

    tables: tuple[Table, ...]
    kind: str = "plain"
    fused_params: dict[str, Any] = field(default_factory=lambda: dict(ADAM))
    optimizer: td.OptimizerConfig = field(default_factory=lambda: td.Adam(lr=0.1))
    sharder_optimizer: td.OptimizerConfig | None = None
    vocabulary: int | None = None
    ends_steps: bool = True
    tolerance: float = 1e-4
    in_backward: tuple[Any, dict[str, Any]] | None = None


def trains_as_unsharded(rank: int, case: Case) -> int:
    """Raises AssertionError unless outputs and rows are the oracle's; returns how many rows."""
    if case.kind in UNEVEN and not all(table.dynamic for table in case.tables):
        with uneven_gather():  # for TorchRec's own kernels
            return _compared(rank, case)
    return _compared(rank, case)


def _compared(rank: int, case: Case) -> int:
    model = sharded(
        case.tables,
        fused_params=case.fused_params,
        optimizer=case.sharder_optimizer,
        weighted=case.kind.startswith("weighted"),
        prepare=None if case.in_backward is None else _in_backward(*case.in_backward),
    )
    oracle = Oracle(case.tables, case.optimizer)
    names = output_names(case.tables)
    features = list(dict.fromkeys(feature for _, _, feature in names))
    differences: list[str] = []  # raised at the end: the other ranks would wait for this one
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense_optimizer = torch.optim.SGD(dense.values(), lr=0.1) if dense else None
    for step in range(STEPS):
        batches = batches_of_ranks(
            case.kind, features, dist.get_world_size(), step, case.vocabulary
        )
        got = model(keyed_jagged(batches[rank], case.kind))
        expected = oracle(batches)
        if sorted(got) != sorted(expected):
            differences.append(f"step {step}: outputs {sorted(got)}, expected {sorted(expected)}")
            break
        mine = {name: _of_rank(rank, batches, table, f) for name, table, f in names}
        differences += [
            f"step {step}: output {name}: {difference}"
            for name in got
            for difference in _difference(
                got[name], expected[name][mine[name]].detach(), case.tolerance
            )
        ]
        weights = {
            name: torch.rand(2, *of.shape, generator=seeded(step * 100 + n))
            for n, (name, of) in enumerate(expected.items())
        }
        loss_of(got, {name: weights[name][:, mine[name]] for name in got}).backward()
        (loss_of(expected, weights) / dist.get_world_size()).backward()
        oracle.step()
        if dense_optimizer is not None:
            dense_optimizer.step()
            dense_optimizer.zero_grad()
        if case.ends_steps:
            model.fused_optimizer.step()
    found = _rows(model)
    for table in case.tables:
        if table.dynamic:
            differences += _row_differences(table, found, oracle, case.tolerance)
    if differences:
        raise AssertionError("\n".join(differences))
    return sum(len(oracle.rows(table.name)) for table in case.tables if table.dynamic)


def loss_of(outputs: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
    """A scalar with gradients that differ by element and depend on the rows."""
    parts = [
        (weights[name][0] * of).sum() + (weights[name][1] * of * of).sum()
        for name, of in outputs.items()
    ]
    return torch.stack(parts).sum()


def _of_rank(rank: int, batches: Sequence[Batch], table: Table, feature: str) -> slice:
    """Where the samples, or ids, of a rank are among those of all."""
    if table.pooling == "none":
        sizes = [sum(len(bag) for bag in batch.ids[feature]) for batch in batches]
    else:
        sizes = [batch.samples() for batch in batches]
    begin = sum(sizes[:rank])
    return slice(begin, begin + sizes[rank])


def _difference(got: Tensor, expected: Tensor, tolerance: float) -> list[str]:
    if got.shape != expected.shape:
        return [f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"]
    if torch.allclose(got.detach(), expected, rtol=tolerance, atol=tolerance):
        return []
    return [f"differs by {(got.detach() - expected).abs().max().item()}"]


# table, id, first column -> a row's columns
_Rows = list[tuple[str, int, int, Tensor]]


def _rows(model: Any) -> _Rows:
    """What all ranks have."""
    mine = [
        (shard.name, id, shard.first_column, row)
        for kernel in kernels(model)
        for t, shard in enumerate(kernel.tables.shards)
        for id, row in rows_by_id(kernel.tables.group, t).items()
    ]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return [row for of_rank in of_ranks for row in of_rank]


def _row_differences(table: Table, found: _Rows, oracle: Oracle, tolerance: float) -> list[str]:
    pieces: dict[int, dict[int, Tensor]] = {}
    differences = []
    for name, id, first, row in found:
        if name == table.name:
            if first in pieces.setdefault(id, {}):
                differences.append(f"table {name}: id {id} is on several ranks")
            pieces[id][first] = row
    rows = {id: torch.cat([of[c] for c in sorted(of)]) for id, of in pieces.items()}
    expected = oracle.rows(table.name)
    if rows.keys() != expected.keys():
        wrong = sorted(rows.keys() ^ expected.keys())
        return [*differences, f"table {table.name}: ids {wrong} are in one of both only"]
    for id, row in rows.items():
        differences += [
            f"table {table.name}: row of {id}: {difference}"
            for difference in _difference(row, expected[id], tolerance)
        ]
    return differences


def _in_backward(optimizer: Any, arguments: dict[str, Any]) -> Any:
    def prepare(model: torch.nn.Module) -> None:
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(optimizer, model.parameters(), arguments)

    return prepare
