"""What ranks do to tables of which the parameters require no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sharded_models import Table, plan_of, sharded
from torch import Tensor, nn
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torch_dynemb as td
from torch_dynemb.torchrec import TableOptions, reshard, table_rows

DIM, LR, NEW = 8, 0.5, 0.25  # NEW: initial value
ROWS = torch.arange(6.0 * DIM).view(6, DIM)  # of ids 0 to 5
# the same on all ranks, so means of gradients over ranks are those of one
IDS = {"a": [0, 1, 77], "b": [0, 2], "c": [2, 77]}


class Content(dict[int, tuple[list[float], int]]):
    """Row and score by id."""


def _content(model: Any, table: str) -> Content:
    return Content(
        (int(id), (row.tolist(), int(score)))
        for part in table_rows(model, table)
        for id, row, score in zip(part.ids, part.rows, part.scores["frequency"], strict=True)
    )


def _freeze(model: nn.Module, names: Sequence[str], requires: bool = False) -> None:
    for name, parameter in model.named_parameters():
        if name.split(".")[-2] in names:
            parameter.requires_grad_(requires)


def _model(sharding: str, pooling: str, dedup: bool, before: Sequence[str]) -> Any:
    tables = [
        Table("kept", DIM, ("a",), pooling, sharding),
        Table("free", DIM, ("b", "c"), pooling, sharding),
    ]
    policy = td.Policy(score="frequency", capacity=100)
    options = TableOptions(initializer=td.Constant(NEW), policy=policy)
    model = sharded(
        tables,
        optimizer=td.SGD(lr=LR),
        options={"kept": options, "free": options},
        use_index_dedup=dedup,
        prepare=lambda unsharded: _freeze(unsharded, before),
    )
    where = "sequences.embeddings" if pooling == "none" else "bags.embedding_bags"
    weights = {f"{where}.{table.name}.weight": ROWS for table in tables}
    model.load_state_dict(weights, strict=False)
    return model


def _step(model: Any) -> dict[str, Tensor]:
    ids = torch.tensor([id for of in IDS.values() for id in of])
    lengths = torch.tensor([len(of) for of in IDS.values()])
    outputs: dict[str, Tensor] = model(KeyedJaggedTensor(list(IDS), ids, lengths=lengths))
    total = torch.stack([of.sum() for of in outputs.values()]).sum()
    if total.requires_grad:
        total.backward()
    model.fused_optimizer.step()
    return {name: of.detach() for name, of in outputs.items()}


def _wrong(model: Any, frozen: Sequence[str], pooling: str) -> list[str]:
    """Train one step; return what is not as it should be."""
    before = {table: _content(model, table) for table in ("kept", "free")}
    outputs = _step(model)
    wrong = []
    for feature, ids in IDS.items():
        table = "kept" if feature == "a" else "free"
        rows = [before[table][id][0] if id in before[table] else [NEW] * DIM for id in ids]
        expected = torch.tensor(rows)
        if pooling != "none":
            expected = expected.sum(0, keepdim=True)
        if not torch.equal(outputs[feature], expected):
            wrong.append(f"output {feature}")
    for table, features in (("kept", "a"), ("free", "bc")):
        expected_ids = dict(before[table])
        after = _content(model, table)
        if table not in frozen:
            for id in [id for feature in features for id in IDS[feature]]:
                row, score = expected_ids.get(id, ([NEW] * DIM, 0))
                expected_ids[id] = ([value - LR for value in row], score)
            expected_ids = {id: (row, after[id][1]) for id, (row, _) in expected_ids.items()}
        if after != expected_ids:
            wrong.append(f"table {table}")
    return wrong


def frozen_tables_stay(rank: int, sharding: str, pooling: str, dedup: bool) -> list[str]:
    """Freeze tables before and after sharding, some and all; return what is wrong."""
    model = _model(sharding, pooling, dedup, before=["kept"])
    wrong = [f"before: {of}" for of in _wrong(model, ["kept"], pooling)]
    _freeze(model, ["kept"], requires=True)
    wrong += [f"thawed: {of}" for of in _wrong(model, [], pooling)]
    _freeze(model, ["free"])
    wrong += [f"after: {of}" for of in _wrong(model, ["free"], pooling)]
    model.requires_grad_(False)
    return wrong + [f"all: {of}" for of in _wrong(model, ["kept", "free"], pooling)]


def stays_frozen_elsewhere(rank: int) -> list[str]:
    """Move a frozen table to other shards; return what is wrong."""
    model = _model("row_wise", "sum", False, before=[])
    _freeze(model, ["kept"])
    tables = [Table(name, DIM, ("a",), "sum", "table_wise") for name in ("kept", "free")]
    reshard(model, ShardingPlan(plan_of(tables)))
    flags = {name.split(".")[-2]: of.requires_grad for name, of in model.named_parameters()}
    wrong = [] if flags == {"kept": False, "free": True} else [f"flags {flags}"]
    groups = {id(group) for group in model.fused_optimizer.param_groups}
    for parameter in model.parameters():
        for optimizer in parameter._in_backward_optimizers:
            if not groups.issuperset(map(id, optimizer.param_groups)):
                wrong.append("hyper-parameters of a parameter")
    return wrong + _wrong(model, ["kept"], "sum")
