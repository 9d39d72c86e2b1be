"""OneEmbedding's modules, against rows that are trained by numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from covering import Case, Space, folder_of_ranks
from modules_space import _strided
from numpy.typing import NDArray
from oracle import initial_state, optimizer_step
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import oneembedding

INITIAL, STEPS, BATCH = 0.25, 3, 5
PADDING = 3  # the place of this id
SIGNED = [0, 5, -1, 7, 2**31 - 1, -(2**31), 3, 4, 9]
IDS = {
    "int64": [0, 5, -1, 7, 2**63 - 1, -(2**63), 3, 4, 9],
    "int32": SIGNED,
    "uint64": [0, 5, 2**64 - 1, 7, 2**63 - 1, 2**63, 3, 4, 9],
    "uint32": [0, 5, 2**32 - 1, 7, 2**31 - 1, 2**31, 3, 4, 9],
}
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
# torch's class, its options, and the same of ours, which the oracle knows
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], td.optim.OptimizerConfig]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}, td.SGD(lr=0.5)),
    "decayed": (
        torch.optim.SGD,
        {"lr": 0.5, "weight_decay": 0.1},
        td.SGD(lr=0.5, weight_decay=0.1),
    ),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.2, "momentum": 0.5, "nesterov": True},
        td.MomentumSGD(lr=0.2, momentum=0.5, nesterov=True),
    ),
    "rmsprop": (
        torch.optim.RMSprop,
        {"lr": 0.1, "eps": 0.1, "momentum": 0.5, "maximize": True},
        td.RMSprop(lr=0.1, eps=0.1, momentum=0.5, maximize=True),
    ),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.5, "eps": 1e-3}, td.Adagrad(lr=0.5, eps=1e-3)),
    "adam": (torch.optim.Adam, {"lr": 0.1, "eps": 0.1}, td.Adam(lr=0.1, eps=0.1)),
    "amsgrad": (
        torch.optim.Adam,
        {"lr": 0.1, "eps": 0.1, "amsgrad": True},
        td.AMSGrad(lr=0.1, eps=0.1),
    ),
    "adamw": (
        torch.optim.AdamW,
        {"lr": 0.1, "eps": 0.1, "weight_decay": 0.2},
        td.AdamW(lr=0.1, eps=0.1, weight_decay=0.2),
    ),
    "own": (None, {}, td.LAMB(lr=0.1, eps=0.1, weight_decay=0.1, stochastic_rounding=False)),
}


def _tables(case: Case) -> int:
    return 1 if case["tables"] == "one" else 3


def _dim(case: Case) -> int:
    return 5 if case["columns"] else 4


def _module(case: Case, folder: str) -> Any:
    """Return an embedding with its optimizer of torch."""
    options = {"persistent_path": folder, "capacity": 1000, "size_factor": 4}
    store = {
        "device": oneembedding.make_device_mem_store_options,
        "host": oneembedding.make_cached_host_mem_store_options,
        "ssd": oneembedding.make_cached_ssd_store_options,
    }[case["store"]](**options, **({} if case["store"] == "device" else {"cache_budget_mb": 1}))
    constant = oneembedding.make_constant_initializer(INITIAL)
    of_columns = [oneembedding.make_column_options(constant) for _ in range(2)]
    tables = None
    if case["tables"] != "one":
        param = of_columns if case["columns"] else constant
        tables = [oneembedding.make_table_options(param, capacity=900) for _ in range(3)]
    kind = (
        oneembedding.MultiTableMultiColumnEmbedding
        if case["columns"]
        else oneembedding.MultiTableEmbedding
    )
    module = kind(
        "e",
        [2, 3] if case["columns"] else 4,
        TYPES[case["dtype"]],
        getattr(torch, case["key_type"]),
        tables,
        store,
        constant,
        padding_idx=IDS[case["key_type"]][PADDING] if case["padding_idx"] else None,
        pg=dist.group.WORLD if case["pg"] else None,
    )
    make, arguments, config = OPTIMIZERS[case["optimizer"]]
    if make is None:
        module.set_optimizer(config)
        return module, module.optimizer
    own = make(module.parameters(), **arguments)
    return module, oneembedding.Optimizer(own, [module])


def _drawn(case: Case, number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return places of ids and their tables, of the shape of the input."""
    random = seeded(10000 * case["seed"] + 500 * rank + number)
    batch = 0 if case["empty"] and (number + rank) % 2 == 0 else BATCH
    shape = (batch, _tables(case))
    if case["tables"] != "columns":
        shape = {"vector": (batch,), "matrix": (batch, 2), "cube": (batch, 2, 1)}[case["form"]]
    places = torch.randint(0, 9, shape, generator=random)
    if case["tables"] == "columns":
        return places, torch.arange(3).expand(shape)
    return places, torch.randint(0, _tables(case), shape, generator=random)


class _Rows:
    """Rows of all tables by place."""

    def __init__(self, case: Case) -> None:
        self.case, self.config = case, OPTIMIZERS[case["optimizer"]][2]
        self.rows = np.full((_tables(case), 9, _dim(case)), INITIAL)
        self.met = set[tuple[int, int]]()
        self.state: dict[tuple[int, int], list[NDArray[np.float64]]] = {}
        self.steps, self.touched = 0, set[tuple[int, int]]()
        self.gradient = np.zeros_like(self.rows)

    def weight(self) -> Tensor:
        rows = self.rows.copy()
        if self.case["padding_idx"]:
            rows[:, PADDING] = 0.0
        return torch.from_numpy(rows).requires_grad_()

    def add(self, gradient: Tensor, places: Tensor, tables: Tensor) -> None:
        self.gradient += gradient.numpy()
        pairs = zip(tables.flatten().tolist(), places.flatten().tolist(), strict=True)
        self.touched |= {
            (t, place) for t, place in pairs if place != PADDING or not self.case["padding_idx"]
        }
        self.met |= self.touched

    def step(self) -> None:
        self.steps += 1
        for at in self.touched:
            state = self.state.get(at) or initial_state(self.config, _dim(self.case))
            row, self.state[at] = optimizer_step(
                self.config, self.steps, self.rows[at], self.gradient[at], state
            )
            self.rows[at] = torch.from_numpy(row).to(TYPES[self.case["dtype"]]).double().numpy()
        self.touched, self.gradient = set(), np.zeros_like(self.rows)


def check(rank: int, case: Case) -> list[str]:
    """Return where outputs or sizes differ; collective."""
    with folder_of_ranks() as folder:
        return _differences(rank, case, folder)


def _differences(rank: int, case: Case, folder: str) -> list[str]:
    world, found = max(case["ranks"], 1), list[str]()
    module, optimizer = _module(case, folder)
    rows = _Rows(case)
    tolerance = TOLERANCE[case["dtype"]]
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=case["scaler"])

    def arguments(drawn: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        places, tables = drawn
        key_type = getattr(torch, case["key_type"])
        ids = torch.tensor(IDS[case["key_type"]], dtype=key_type).view(torch.uint8).view(9, -1)
        ids = ids[places.flatten()].view(key_type).view(places.shape)
        if case["strided"]:
            ids = _strided(ids.view(torch.int64 if ids.itemsize == 8 else torch.int32)).view(
                key_type
            )
        if case["tables"] == "numbers":
            return ids, tables.to(getattr(torch, case["table_ids_type"]))
        return (ids,)

    def looked_up(called: Any, number: int) -> tuple[Tensor, list[Any]]:
        of_ranks = [_drawn(case, number, of) for of in range(world)]
        output = called(*arguments(of_ranks[rank]))
        expected = []
        for places, tables in of_ranks:
            weight = rows.weight()
            expected.append((weight[tables, places], weight, places, tables))
        own = expected[rank][0].detach()
        if output.shape != own.shape or output.dtype != TYPES[case["dtype"]]:
            found.append(f"lookup {number}: {output.dtype} {tuple(output.shape)}")
        elif not torch.allclose(output.detach().double(), own, rtol=tolerance, atol=tolerance):
            off = (output.detach().double() - own).abs().max()
            found.append(f"lookup {number}: off by up to {off:.3g}")
        return output, expected

    def looked_up_all(called: Any, what: str) -> None:
        """Read all places of all tables."""
        numbers = torch.arange(_tables(case))
        places = torch.arange(9)[:, None].expand(9, len(numbers))
        tables = numbers.expand(places.shape)
        with torch.no_grad():
            got = called(*arguments((places, tables)))
        expected = rows.weight().detach()[tables, places]
        if not torch.allclose(got.double(), expected, rtol=tolerance, atol=tolerance):
            found.append(f"{what}: off by up to {(got.double() - expected).abs().max():.3g}")

    number = 0
    for step in range(STEPS):
        for _ in range(case["micro_batches"]):
            number += 1
            if case["prefetch"]:
                module.prefetch(*arguments(_drawn(case, number, rank)))
            output, expected = looked_up(module, number)
            for of, (of_rank, weight, places, tables) in enumerate(expected):
                random = seeded(5000 * of + 7 * number)
                gradient = torch.randint(1, 5, of_rank.shape, generator=random) / 4
                if case["gradient"] == "expanded":
                    gradient = torch.ones(of_rank.shape)
                (of_rank * gradient.double()).sum().backward()
                rows.add(weight.grad / world, places, tables)
                if of == rank:
                    loss = (output.float() * gradient).sum()
                    if case["gradient"] == "expanded":
                        loss = output.float().sum()
                    scaler.scale(loss).backward()
        if case["scaler"]:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        rows.step()
        if step == 1 and case["reload"] != "no":
            other, of_other = _module(case, f"{folder}/other")
            if case["reload"] == "state_dict":
                other.load_state_dict(module.state_dict())
                of_other.load_state_dict(optimizer.state_dict())
            elif case["reload"] == "snapshot":
                module.save_snapshot("s")
                module.load_snapshot("s")
                other, of_other = module, optimizer
            else:
                td.checkpoint.save(f"{folder}/saved", module)
                td.checkpoint.load(f"{folder}/saved", other)
            module, optimizer = other, of_other
        if case["eval_between"]:
            module.eval()
            with torch.no_grad():
                looked_up(module, 100 + step)
            module.train()
    module.eval()
    looked_up_all(module, "rows")
    if case["freeze"]:
        looked_up_all(td.freeze(module), "frozen rows")
    sizes = [sum(table == t for table, _ in rows.met) for t in range(_tables(case))]
    of_ranks = [torch.tensor(list(module.sizes().values()))]
    if case["ranks"]:
        of_ranks = [torch.empty_like(of_ranks[0]) for _ in range(world)]
        dist.all_gather(of_ranks, torch.tensor(list(module.sizes().values())))
    if (got := torch.stack(of_ranks).sum(0).tolist()) != sizes:
        found.append(f"sizes: {got}, expected {sizes}")
    return found


SPACE = Space(
    "oneembedding",
    axes={
        "ranks": [0, 1, 2],
        "pg": [False, True],
        "tables": ["one", "columns", "numbers"],  # of the input: a column or a number each
        "columns": [False, True],
        "form": ["matrix", "vector", "cube"],
        "key_type": list(IDS),
        "table_ids_type": ["int64", "int32"],
        "strided": [False, True],
        "empty": [False, True],
        "padding_idx": [False, True],
        "dtype": list(TYPES),
        "store": ["device", "host", "ssd"],
        "optimizer": list(OPTIMIZERS),
        "micro_batches": [1, 2],
        "gradient": ["random", "expanded"],
        "scaler": [False, True],
        "prefetch": [False, True],
        "eval_between": [False, True],
        "reload": ["no", "state_dict", "snapshot", "checkpoint"],
        "freeze": [False, True],
    },
    constraints=[
        lambda ranks, pg: not pg or ranks > 0,
        lambda tables, form: tables != "columns" or form == "matrix",
        lambda tables, table_ids_type: tables == "numbers" or table_ids_type == "int64",
        lambda store, reload: store != "ssd" or reload != "state_dict",  # refused
        # torch's optimizers have no option for it, so rows are rounded stochastically
        lambda dtype, optimizer: dtype == "float32" or optimizer == "own",
    ],
    check=check,
    public=[
        oneembedding.MultiTableEmbedding,
        oneembedding.MultiTableMultiColumnEmbedding,
        oneembedding.make_table_options,
    ],
    without_axis={
        "name": "seeds random rows, which are constant here: test_oneembedding_tables.py",
        "seed": "of random rows: test_oneembedding_tables.py",
        "embedding_dim": "axis columns",
        "store_options": "axis store",
        "default_initializer": "constant rows, which the oracle knows",
        "param": "axis columns",
        "capacity": "has room; evictions: test_oneembedding_tables.py",
        "device": "--device: test_oneembedding_tables.py",
        "ids": "axis form",
        "table_ids": "axis tables",
    },
)
