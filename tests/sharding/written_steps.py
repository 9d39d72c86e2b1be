"""What the ranks of test_written_rows do: they write rows of ids that other ranks own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sharded_models import Table, sharded
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torch_dynemb as td
from torch_dynemb.torchrec import TableOptions, table_rows

DIM = 8


def content(ids: Tensor) -> Tensor:
    return ids[:, None] + torch.arange(float(DIM)) / 16


def keyed(ids: list[int], rows: Tensor | None) -> KeyedJaggedTensor:
    lengths = torch.tensor([len(ids)])
    return KeyedJaggedTensor(["user"], torch.tensor(ids), rows, lengths=lengths)


def rows_by_id(model: nn.Module, name: str) -> dict[int, list[float]]:
    batches = list(table_rows(model, name))
    return {
        id: row
        for batch in batches
        for id, row in zip(batch.ids.tolist(), batch.rows.tolist(), strict=True)
    }


def model_with(capacity: int | None, on_full: Any = "evict") -> Any:
    policy = td.Policy() if capacity is None else td.Policy(capacity=capacity, on_full=on_full)
    table = Table("users", DIM, ("user",), "none", written=True)
    options = {"users": TableOptions(policy=policy, initializer=td.Constant(0.5))}
    return sharded([table], optimizer=td.SGD(lr=0.1), options=options)


def refused(rank: int) -> tuple[dict[str, str], bool]:
    """The errors on this rank if only rank 1 has a wrong batch; whether the table stays."""
    model = model_with(200, "error")
    known = list(range(100))
    model.write(keyed(known, content(torch.tensor(known))))
    good = keyed([1, 1000], torch.zeros(2, DIM))
    many = list(range(5000, 5400))
    wrong: dict[str, Any] = {
        "kind": 3,
        "keys": KeyedJaggedTensor(["usr"], torch.tensor([1]), lengths=torch.tensor([1])),
        "weights": keyed([1], None),
        "dim": keyed([1], torch.zeros(1, DIM + 1)),
        "dtype": keyed([1], torch.zeros(1, DIM, dtype=torch.int64)),
        "room": keyed(many, torch.zeros(len(many), DIM)),
    }
    before = rows_by_id(model, "users")
    raised = {}
    for name, batch in wrong.items():
        try:
            model.write(batch if rank == 1 else good)
        except Exception as error:
            raised[name] = f"{type(error).__name__}: {error}"
    return raised, rows_by_id(model, "users") == before


def inserted(rank: int, sharding: str) -> tuple[int, list[int], dict[int, list[float]]]:
    """Numbers of new ids here, the ids that the function got, and all rows."""
    if sharding == "nn":
        users = td.DynamicEmbedding(
            DIM, name="users", optimizer=td.SGD(lr=0.1), process_group=dist.group.WORLD
        )
        model: Any = nn.ModuleDict({"users": users})
    else:
        model = sharded([Table("users", DIM, ("user",), "none", sharding)])
    asked: list[int] = []

    def rows_of(ids: Tensor) -> Tensor:
        asked.extend(ids.tolist())
        return content(ids)

    td.insert_new(model, "users", torch.arange(10), lambda ids: -content(ids))
    ids = torch.arange(50 * rank, 50 * rank + 70).repeat(2)
    count = td.insert_new(model, "users", ids, rows_of)
    count += td.insert_new(model, "users", ids, rows_of)
    return count, asked, rows_by_id(model, "users")


def of_private_tables(rank: int) -> list[int]:
    """Ids of a table that each rank has for itself."""
    users = td.DynamicEmbedding(DIM, name="users", optimizer=td.SGD(lr=0.1))
    td.private_to_rank(users)
    td.insert_new(users, "users", torch.arange(rank, rank + 3), content)
    return sorted(id for batch in users.group.export(0) for id in batch.ids.tolist())


def function_that_fails(rank: int) -> tuple[str, int]:
    """The error of a function that fails on rank 1, and the number of ids afterwards."""
    model = sharded([Table("users", DIM, ("user",), "none")])

    def rows_of(ids: Tensor) -> Tensor:
        if rank == 1:
            raise OSError("rows_of: no vectors here")
        return content(ids)

    try:
        td.insert_new(model, "users", torch.arange(40), rows_of)
    except OSError as error:
        return str(error), len(rows_by_id(model, "users"))
    return "nothing", -1
