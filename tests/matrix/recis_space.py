"""RecIS's modules: features of all kinds, against PyTorch in float64 and numpy's optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from covering import Case, Space, folder_of_ranks
from modules_space import IDS, Bags, _strided
from numpy.typing import NDArray
from oracle import initial_state, optimizer_step
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.recis import (
    DynamicEmbedding,
    EmbeddingEngine,
    EmbeddingOption,
    RaggedTensor,
    SparseAdam,
    SparseAdamW,
    SparseAdamWTF,
    filter_out_sparse_param,
)
from torch_dynemb.recis.optimizers import SparseOptimizer

INITIAL, STEPS, SAMPLES, TILE = 0.25, 4, 4, 2
OUTER = [0, 1, 1, SAMPLES]  # bags of the samples of a feature with two ragged dimensions
COMBINERS = ("sum", "mean", "tile")
EXACT: dict[str, Any] = {"stochastic_rounding": False}
OPTIMIZERS: dict[str, tuple[Any, td.optim.OptimizerConfig]] = {  # ours, and what it is
    "sgd": (None, td.SGD(lr=0.5, **EXACT)),
    "lamb": (None, td.LAMB(lr=0.1, eps=0.1, weight_decay=0.1, **EXACT)),
    "adam": (SparseAdam, td.Adam(lr=0.1, eps=0.1, weight_decay=0.1, **EXACT)),
    "adamw": (SparseAdamW, td.AdamW(lr=0.1, eps=0.1, weight_decay=0.1, **EXACT)),
    # its weight decay is not multiplied by lr
    "adamw_tf": (SparseAdamWTF, td.AdamWTF(lr=0.1, eps=0.1, weight_decay=1.0, **EXACT)),
}
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 6e-2}


def _features(case: Case) -> dict[str, tuple[str, int, str]]:
    """Return the table, the dim and the combiner of each feature."""
    first = COMBINERS.index(case["combiner"])
    second = COMBINERS[(first + 1) % 3]
    return {
        "embedding": {"a": ("t", 4, case["combiner"])},
        "engine": {"a": ("t", 4, case["combiner"]), "b": ("u", 6, second)},
        "alike": {"a": ("t", 4, case["combiner"]), "b": ("u", 4, second)},
        "shared": {"a": ("t", 4, case["combiner"]), "b": ("t", 4, second)},
        "joint": {"a": ("t", 4, case["combiner"]), "b": ("t", 4, case["combiner"])},
    }[case["module"]]


def _module(case: Case, folder: str) -> Any:
    options = {
        name: EmbeddingOption(
            embedding_dim=dim,
            shared_name=table,
            combiner=combiner,
            combiner_kwargs={"tile_len": TILE} if combiner == "tile" else None,
            initializer=td.Constant(INITIAL),
            dtype=TYPES[case["dtype"]],
            block_size=case["block_size"],
            max_partition_num=case["max_partition_num"],
            use_weight=case["use_weight"],
            grad_reduce_by=case["grad_reduce_by"],
            max_rows=case["max_rows"],
            storage=td.SSDStore(folder, cache=40) if case["storage"] == "ssd" else None,
            pg=dist.group.WORLD if case["pg"] else None,
        )
        for name, (table, dim, combiner) in _features(case).items()
    }
    return (
        DynamicEmbedding(options["a"])
        if case["module"] == "embedding"
        else EmbeddingEngine(options)
    )


def _optimizer(case: Case, module: Any) -> Any:
    make, config = OPTIMIZERS[case["optimizer"]]
    tables = filter_out_sparse_param(module)
    if make is None:
        optimizer = SparseOptimizer(tables, config)
    else:
        optimizer = make(tables, lr=config.lr, eps=config.eps, weight_decay=0.1)
    optimizer.set_grad_accum_steps(case["micro_batches"])
    return optimizer


def _drawn(case: Case, number: int, rank: int) -> dict[str, Bags]:
    found = {}
    for n, name in enumerate(_features(case)):
        random = seeded(10000 * case["seed"] + 500 * rank + 10 * number + n)
        empties = (number + rank) % 2 == 0
        samples = 0 if case["empty"] == "batch" and empties else SAMPLES
        lengths = torch.randint(0, 4, (samples,), generator=random).tolist()
        if case["form"] in ("dense", "flat"):
            lengths = [3] * (samples if case["form"] == "dense" else 1)
        if case["empty"] == "bags" and empties:
            lengths = [0] * len(lengths)
        places = [torch.randint(0, 14, (n,), generator=random).tolist() for n in lengths]
        if places and places[0]:
            places[0][:2] = [1, 1][: len(places[0])]  # an id twice
        weights = [
            ((1 + torch.randint(0, 8, (n,), generator=random)) / 4).tolist() for n in lengths
        ]
        found[name] = Bags(places, weights)
    return found


def _input(case: Case, of_features: dict[str, Bags]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return each feature, and the leaf with its weights."""
    known = torch.tensor(IDS[case["ids"]], dtype=getattr(torch, case["ids_type"]))
    inputs, leaves = {}, {}
    for name, bags in of_features.items():
        places, offsets, weights = bags.flat()
        leaf = weights.float().requires_grad_(case["weights_learn"])
        if case["weighted"]:
            leaves[name] = leaf
        ids = known[places]
        if case["strided"]:
            ids, given = _strided(ids), _strided(leaf)
        else:
            given = leaf
        if case["form"] in ("ragged", "deep"):
            ends = torch.cat([offsets, torch.tensor([len(places)])])
            all_offsets = [ends.to(getattr(torch, case["offsets_type"]))]
            if case["form"] == "deep":
                outer = OUTER if bags.places else [0, 0]
                all_offsets.insert(0, torch.tensor(outer).to(all_offsets[0].dtype))
            inputs[name] = RaggedTensor(ids, all_offsets, given if case["weighted"] else None)
            continue
        shape = (-1,) if case["form"] == "flat" else (len(bags.places), 3)
        inputs[name] = ids.view(shape)
        if case["weighted"]:
            inputs[name] = (ids.view(shape), given.view(shape))
    return inputs, leaves


def _combined(weight: Tensor, bags: Bags, weights: Tensor | None, combiner: str) -> Tensor:
    """Return [bags, columns]."""
    bounds = [0, *itertools.accumulate(map(len, bags.places))]
    found = []
    for places, (begin, end) in zip(bags.places, itertools.pairwise(bounds), strict=True):
        rows = weight[torch.tensor(places, dtype=torch.int64)]
        of = torch.ones(end - begin, dtype=torch.float64) if weights is None else weights[begin:end]
        rows = rows * of[:, None]
        if combiner == "tile":
            tile = torch.zeros(TILE, weight.shape[1], dtype=torch.float64)
            found.append(torch.cat([rows, tile])[:TILE].flatten())
        else:
            total = rows.sum(0)
            found.append(total / of.sum() if combiner == "mean" and places else total)
    return torch.stack(found) if found else weight.repeat(1, TILE if combiner == "tile" else 1)[:0]


def _padded(case: Case, of_bags: Tensor) -> Tensor:
    """Return what a feature gets for its bags."""
    if case["form"] == "flat":
        return of_bags[0]
    if case["form"] != "deep":
        return of_bags
    if not len(of_bags):
        return of_bags[None]
    parts = [of_bags[a:b] for a, b in itertools.pairwise(OUTER)]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


class _Rows:
    """Rows of a table by place, and their state."""

    def __init__(self, case: Case, dim: int) -> None:
        self.case, self.config = case, OPTIMIZERS[case["optimizer"]][1]
        self.rows = np.full((14, dim), INITIAL)
        self.met, self.steps = set[int](), 0
        self.state: dict[int, list[NDArray[np.float64]]] = {}
        self.gradient = np.zeros_like(self.rows)
        self.touched = set[int]()

    def weight(self, *, reads: bool) -> Tensor:
        rows = self.rows.copy()
        if reads:
            rows[[place for place in range(14) if place not in self.met]] = 0.0
        return torch.from_numpy(rows).requires_grad_()

    def add(self, of_ranks: Sequence[tuple[Tensor, set[int]]]) -> None:
        """Add gradients of a step of each rank, with the places that it has sent."""
        total = sum((gradient.numpy() for gradient, _ in of_ranks), np.zeros_like(self.rows))
        senders = np.array([sum(place in sent for _, sent in of_ranks) for place in range(14)])
        by_id = self.case["grad_reduce_by"] == "id"
        self.gradient += total / (np.maximum(senders, 1)[:, None] if by_id else len(of_ranks))
        self.touched |= {place for _, sent in of_ranks for place in sent}
        self.met |= self.touched

    def step(self) -> None:
        self.steps += 1
        for place in self.touched:
            state = self.state.get(place) or initial_state(self.config, self.rows.shape[1])
            row, self.state[place] = optimizer_step(
                self.config, self.steps, self.rows[place], self.gradient[place], state
            )
            self.rows[place] = torch.from_numpy(row).to(TYPES[self.case["dtype"]]).double().numpy()
        self.touched, self.gradient = set(), np.zeros_like(self.rows)


def _called(case: Case, module: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    if case["module"] == "embedding":
        given = inputs["a"] if isinstance(inputs["a"], tuple) else (inputs["a"],)
        return {"a": module(*given)}
    if case["call"] != "plain" and hasattr(module, case["call"]):
        inputs = getattr(module, case["call"])(inputs)
    return dict(module(inputs))


def check(rank: int, case: Case) -> list[str]:
    """Return where outputs, gradients of weights or rows differ; collective."""
    with folder_of_ranks() as folder:
        return _differences(rank, case, folder)


def _differences(rank: int, case: Case, folder: str) -> list[str]:
    world, found = max(case["ranks"], 1), list[str]()
    module = _module(case, f"{folder}/rows")
    optimizer = _optimizer(case, module)
    features = _features(case)
    of_tables = {table: _Rows(case, dim) for table, dim, _ in features.values()}
    tolerance = TOLERANCE[case["dtype"]]

    def differs(what: str, got: Tensor, expected: Tensor) -> None:
        if got.shape != expected.shape:
            found.append(f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
        elif not torch.allclose(got.double(), expected, rtol=tolerance, atol=tolerance):
            found.append(f"{what}: off by up to {(got.double() - expected).abs().max():.3g}")

    def looked_up(called: Any, number: int, *, reads: bool) -> dict[str, Any]:
        """Look up; return for each feature its output, and what every rank expects."""
        of_ranks = [_drawn(case, number, of) for of in range(world)]
        inputs, leaves = _input(case, of_ranks[rank])
        outputs = _called(case, called, inputs)
        parts = {}
        for name, (table, _, combiner) in features.items():
            weights = [of[name].flat()[2].requires_grad_() for of in of_ranks]
            used = case["weighted"] and case["use_weight"]
            rows = [of_tables[table].weight(reads=reads) for _ in range(world)]
            expected = [
                _padded(case, _combined(weight, of[name], given if used else None, combiner))
                for weight, of, given in zip(rows, of_ranks, weights, strict=True)
            ]
            differs(f"lookup {number}, {name}", outputs[name].detach(), expected[rank].detach())
            sent = [{place for bag in of[name].places for place in bag} for of in of_ranks]
            leaf = (leaves[name], weights[rank]) if used and case["weights_learn"] else None
            parts[name] = (outputs[name], expected, rows, sent, leaf)
        return parts

    number = 0
    for step in range(STEPS):
        for _ in range(case["micro_batches"]):
            number += 1
            parts = looked_up(module, number, reads=False)
            losses, expected_losses = [], []
            for n, (output, expected, *_) in enumerate(parts.values()):
                for of, of_rank in enumerate(expected):
                    random = seeded(5000 * of + 7 * number + n)
                    gradient = torch.randint(1, 5, of_rank.shape, generator=random) / 4
                    if case["gradient"] == "expanded":
                        gradient = torch.ones(of_rank.shape)
                    expected_losses.append((of_rank * gradient.double()).sum())
                    if of == rank and case["gradient"] == "expanded":
                        losses.append(output.float().sum())
                    elif of == rank:
                        losses.append((output.float() * gradient).sum())
            torch.stack(losses).sum().backward()
            torch.stack(expected_losses).sum().backward()
            for name, (*_, leaf) in parts.items():
                if leaf is not None:
                    got, expected = (
                        torch.zeros_like(t) if t.grad is None else t.grad for t in leaf
                    )
                    differs(f"step {step}, gradient of weights of {name}", got, expected)
            joint: dict[tuple[str, str], list[Any]] = {}  # a lookup for each table and combiner
            for name, (table, _, combiner) in features.items():
                joint.setdefault((table, combiner), []).append(parts[name])
            for (table, _), alike in joint.items():
                gradients = [sum(of.grad for of in rows) for rows in _by_rank(alike, 2)]
                sent = [set().union(*of) for of in _by_rank(alike, 3)]
                of_tables[table].add(list(zip(gradients, sent, strict=True)))
            optimizer.step()
        for of_table in of_tables.values():
            of_table.step()
        if step == 1 and case["reload"] != "no":
            other = _module(case, f"{folder}/other")
            of_other = _optimizer(case, other)
            if case["reload"] == "state_dict":
                other.load_state_dict(module.state_dict())
                of_other.load_state_dict(optimizer.state_dict())
            else:
                td.checkpoint.save(f"{folder}/saved", module)
                td.checkpoint.load(f"{folder}/saved", other)
            module, optimizer = other, of_other
        if case["eval_between"]:
            module.eval()
            with torch.no_grad():
                looked_up(module, 100 + step, reads=True)
            module.train()
    if case["freeze"]:
        looked_up(td.freeze(module), 200, reads=True)
    found += _wrong_rows(case, module, of_tables, differs)
    return found


def _by_rank(parts: Sequence[Any], entry: int) -> list[tuple[Any, ...]]:
    return list(zip(*(part[entry] for part in parts), strict=True))


def _wrong_rows(case: Case, module: Any, of_tables: dict[str, _Rows], differs: Any) -> list[str]:
    found = []
    physical = {id(table): table for table in filter_out_sparse_param(module).values()}.values()
    for name, of_table in of_tables.items():
        rows: dict[int, Tensor] = {}
        for table in physical:
            if name in table.children_hashtable:
                rows |= dict(zip(table.ids(name).tolist(), table.embeddings(name), strict=True))
        of_ranks: list[Any] = [rows]
        if case["ranks"]:
            of_ranks = [None] * case["ranks"]
            dist.all_gather_object(of_ranks, rows)
        whole = {id: row for of in of_ranks for id, row in of.items()}
        places = sorted(of_table.met)
        if set(whole) != {IDS[case["ids"]][place] for place in places}:
            found.append(f"ids of {name}: {sorted(whole)}")
        elif places:
            got = torch.stack([whole[IDS[case["ids"]][place]] for place in places])
            differs(f"rows of {name}", got, torch.from_numpy(of_table.rows[places]))
    return found


SPACE = Space(
    "recis",
    axes={
        "ranks": [0, 1, 2],
        "pg": [False, True],
        "module": ["embedding", "engine", "alike", "shared", "joint"],
        "form": ["dense", "flat", "ragged", "deep"],
        "combiner": list(COMBINERS),
        "weighted": [False, True],
        "weights_learn": [False, True],
        "use_weight": [True, False],
        "ids": list(IDS),
        "ids_type": ["int64", "int32"],
        "offsets_type": ["int64", "int32"],
        "strided": [False, True],
        "empty": ["none", "bags", "batch"],
        "dtype": list(TYPES),
        "optimizer": list(OPTIMIZERS),
        "micro_batches": [1, 2],
        "gradient": ["random", "expanded"],
        "grad_reduce_by": ["worker", "id"],
        "block_size": [10240, 1],
        "max_partition_num": [65536, 2],
        "max_rows": [None, 1000],
        "storage": ["none", "ssd"],
        "call": ["plain", "exchange_ids", "prefetch"],
        "eval_between": [False, True],
        "reload": ["no", "state_dict", "checkpoint"],
        "freeze": [False, True],
    },
    constraints=[
        lambda ranks, pg: not pg or ranks > 0,
        lambda weighted, weights_learn: weighted or not weights_learn,
        lambda weighted, use_weight: weighted or use_weight,
        lambda weighted, module, form: (
            not weighted or module == "embedding" or form in ("ragged", "deep")
        ),
        lambda dtype, optimizer: dtype == "float32" or optimizer in ("sgd", "lamb"),  # rounds so
        lambda ids, ids_type: ids == "small" or ids_type == "int64",
        lambda form, offsets_type: offsets_type == "int64" or form in ("ragged", "deep"),
        lambda form, empty: empty == "none" or form in ("ragged", "deep"),
        lambda module, call: module != "embedding" or call == "plain",
        lambda storage, reload: storage == "none" or reload != "state_dict",  # refused
    ],
    check=check,
    public=[EmbeddingOption],
    without_axis={
        "embedding_dim": "axis module",
        "device": "--device: test_recis_lookup.py",
        "trainable": "no ids get rows: test_recis_lookup.py",
        "shared_name": "axis module",
        "children": "axis module has one of each table: test_recis_lookup.py",
        "coalesced": "of several children: test_recis_lookup.py",
        "initializer": "constant rows, which the oracle knows; others: test_initializers.py",
        "combiner_kwargs": "axis combiner",
        "filter_hook": "removes rows: test_recis_scores.py",
        "admit_hook": "decides which ids get rows: test_recis_lookup.py",
        "fp16_enabled": "of int8 rows: test_recis_lookup.py",
        "score_from": "needs scores: test_recis_scores.py",
        "no_reduce": "gives rows apart: test_recis_later.py",
    },
)
