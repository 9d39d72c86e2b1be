"""Sharded collections of TorchRec with dynamic tables, against numpy in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from covering import Case, Space
from fbgemm_gpu.split_embedding_configs import SparseType
from numpy.typing import NDArray
from oracle import initial_state, optimizer_step
from seeding import seeded
from sharded_models import (
    BAG_SHARDINGS,
    SEQUENCE_SHARDINGS,
    STATIC_VALUE,
    Table,
    sharded,
)
from static_rows import insert_static_rows
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    TableOptions,
    table_rows,
)

KNOWN = 12  # ids 0 to 11 have rows before the first step
NEW = 4  # ids after these that get theirs in training, or none
PADDING = KNOWN  # one of these
INITIAL = 0.25  # what rows of new ids start with
SAMPLES, STEPS = 4, 2
Floats = NDArray[np.float64]

OPTIMIZERS = {
    "sgd": td.SGD(lr=0.5, stochastic_rounding=False),
    "adam": td.Adam(lr=0.1, eps=0.1, stochastic_rounding=False),
    "adagrad": td.Adagrad(lr=0.5, initial_accumulator_value=0.1, stochastic_rounding=False),
    "row_wise_adagrad": td.RowWiseAdagrad(lr=0.5, stochastic_rounding=False),
    "momentum": td.MomentumSGD(lr=0.2, momentum=0.5, weight_decay=0.1, stochastic_rounding=False),
}
POLICIES = {
    "none": td.Policy(),
    "room": td.Policy(score="step", capacity=400),
    "frequency": td.Policy(score="frequency", capacity=400, on_full="evict"),
    "ttl": td.Policy(ttl=10**6),
}
TYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
BY_ROWS = ("table_wise", "row_wise", "table_row_wise")  # shards with whole rows
TOLERANCE = {"FP32": 1e-5, "FP16": 2e-2, "BF16": 1.6e-1}  # gradients of outputs are rounded, too


@dataclass(frozen=True)
class Bags:
    """The bags of a feature on a rank: ids and weights, and the bag of each sample."""

    ids: list[list[int]]
    weights: list[list[float]]
    of_samples: list[int]


def _tables(case: Case) -> list[Table]:
    """Return t, of features a and b, and perhaps another one before it."""
    pooling = case["pooling"]
    other = {"sum": "mean", "mean": "sum", "none": "none"}[pooling]
    options: dict[str, Any] = {
        "sharding": case["sharding"],
        "num_embeddings": KNOWN + NEW,
        "data_type": case["data_type"],
    }
    padding_idx = PADDING if case["padding_idx"] else None
    t = Table("t", case["dim"], ("a", "b"), pooling, padding_idx=padding_idx, **options)
    dim = case["dim"] if pooling == "none" else 24  # sequences have one
    others = {
        "one": [],
        "two": [Table("u", dim, ("c",), other, **options)],
        "shared": [Table("u", dim, ("b", "c"), other, **options)],
        "static": [Table("u", dim, ("c",), other, dynamic=False, **options)],
    }
    return [*others[case["beside"]], t]


def _bags(case: Case, rank: int, step: int, feature: int) -> Bags:
    random = seeded(10000 * case["seed"] + 100 * step + 10 * rank + feature)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=random))

    empty = case["empty"]
    samples = SAMPLES
    if empty == "batch" or (empty == "rank" and rank == 0):
        samples = 0
    bags = min(samples, 1 + (step + feature + rank) % SAMPLES) if case["vbe"] else samples
    ids = [[draw(KNOWN + NEW) for _ in range(draw(4))] for _ in range(bags)]
    if bags:
        ids[0] = [1, 1, PADDING]  # an id twice
    if empty == "bags" or (empty == "feature" and feature == 0):
        ids = [[] for _ in ids]
    weights = [[(1 + draw(8)) / 4 if case["weighted"] else 1.0 for _ in bag] for bag in ids]
    of_samples = [draw(bags) if case["vbe"] else sample for sample in range(samples)]
    return Bags(ids, weights, of_samples)


def _strided(tensor: Tensor) -> Tensor:
    """Return the same values, each beside another value."""
    return torch.stack([tensor, torch.full_like(tensor, 3)], dim=-1)[..., 0]


def _batch(case: Case, of_features: Mapping[str, Bags]) -> KeyedJaggedTensor:
    ids_type, lengths_type = getattr(torch, case["ids_type"]), getattr(torch, case["lengths_type"])
    parts: dict[str, Tensor | None] = {
        "ids": torch.tensor(
            [id for of in of_features.values() for bag in of.ids for id in bag], dtype=ids_type
        ),
        "weights": torch.tensor(
            [w for of in of_features.values() for bag in of.weights for w in bag],
            dtype=torch.float32,
        ),
        "lengths": torch.tensor(
            [len(bag) for of in of_features.values() for bag in of.ids], dtype=lengths_type
        ),
        "inverse": torch.tensor([of.of_samples for of in of_features.values()], dtype=lengths_type),
    }
    for name, tensor in parts.items():
        if case["strided"] in (name, "all"):
            parts[name] = _strided(tensor)
    weights = parts["weights"] if case["weighted"] else None
    sizes: dict[str, Any] = {"lengths": parts["lengths"]}
    if case["offsets"]:
        lengths = parts["lengths"]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(lengths_type)
        sizes = {"offsets": _strided(offsets) if case["strided"] == "lengths" else offsets}
    keys = list(of_features)
    if not case["vbe"]:
        stride = len(next(iter(of_features.values())).ids)
        return KeyedJaggedTensor(keys, parts["ids"], weights, **sizes, stride=stride)
    return KeyedJaggedTensor(
        keys,
        parts["ids"],
        weights,
        **sizes,
        stride_per_key_per_rank=[[len(of.ids)] for of in of_features.values()],
        inverse_indices=(keys, parts["inverse"]),
    )


class _Rows:
    """The rows of a table and their optimizer state."""

    def __init__(self, case: Case, table: Table, rows: Tensor) -> None:
        self.case, self.table = case, table
        self.dtype = TYPES[table.data_type]
        self.config = OPTIMIZERS[case["optimizer"]]
        self.rows = {id: row.numpy().astype(np.float64) for id, row in enumerate(rows.double())}
        self.state: dict[int, list[Floats]] = {}
        self.steps = 0
        self.gradient: dict[int, Floats] = {}

    def row(self, id: int, *, reads: bool = False) -> Floats:
        zeros = reads and self.case["eval_default"] == "zeros"
        if id == self.table.padding_idx:
            return np.zeros(self.table.dim)
        return self.rows.get(id, np.full(self.table.dim, 0.0 if zeros else INITIAL))

    def output(self, bags: Bags, *, reads: bool) -> Floats:
        """Return [samples, dim], or [ids, dim] without pooling; ``reads``: no id gets a row."""
        if self.table.pooling == "none":
            ids = [id for bag in bags.of_samples for id in bags.ids[bag]]
            found = [self.row(id, reads=reads) for id in ids]
        else:
            found = [
                sum(
                    (w * self.row(id, reads=reads) for id, w in self._weighted(bags, bag)),
                    self.row_of_zeros(),
                )
                for bag in bags.of_samples
            ]
        return np.array(found).reshape(-1, self.table.dim)

    def row_of_zeros(self) -> Floats:
        return np.zeros(self.table.dim)

    def _weighted(self, bags: Bags, bag: int) -> list[tuple[int, float]]:
        counted = [
            (id, weight)
            for id, weight in zip(bags.ids[bag], bags.weights[bag], strict=True)
            if id != self.table.padding_idx
        ]
        total = sum(w for _, w in counted) if self.table.pooling == "mean" else 1.0
        return [(id, weight / total) for id, weight in counted]

    def add_gradient(self, bags: Bags, of_output: Floats) -> None:
        """Add that of an output to the gradients of its rows."""
        if self.table.pooling == "none":
            ids = [id for bag in bags.of_samples for id in bags.ids[bag]]
            parts = [(id, 1.0, n) for n, id in enumerate(ids) if id != self.table.padding_idx]
        else:
            parts = [
                (id, weight, sample)
                for sample, bag in enumerate(bags.of_samples)
                for id, weight in self._weighted(bags, bag)
            ]
        for id in {id for bag in bags.ids for id in bag} - {self.table.padding_idx}:
            self.gradient.setdefault(id, self.row_of_zeros())  # no sample may have the bag
        for id, weight, n in parts:
            self.gradient[id] = self.gradient[id] + weight * of_output[n]

    def step(self, world: int) -> None:
        """Update rows by the mean of the ranks' gradients."""
        self.steps += 1
        for id, total in self.gradient.items():
            state = self.state.get(id) or initial_state(self.config, self.table.dim)
            row, self.state[id] = optimizer_step(
                self.config, self.steps, self.row(id), total / world, state
            )
            self.rows[id] = torch.from_numpy(row).to(self.dtype).double().numpy()
        self.gradient = {}


def _loss(case: Case, outputs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the loss with these gradients by output."""
    if case["gradient"] == "expanded":
        return sum((output.sum() for output, _ in outputs), torch.zeros(()))
    if case["gradient"] == "strided":
        return sum(((out.t().contiguous() * g.t()).sum() for out, g in outputs), torch.zeros(()))
    return sum(((output * g).sum() for output, g in outputs), torch.zeros(()))


def _model(case: Case, tables: Sequence[Table], folder: str) -> Any:
    padding = {table.name: table.padding_idx for table in tables}
    options = {
        table.name: TableOptions(
            initializer=td.Constant(INITIAL),
            policy=POLICIES[case["policy"]],
            padding_idx=padding[table.name],
            trainable=case["trainable"],
            split=case["split"],
            eval_default=case["eval_default"],
            delayed_gradients=case["delayed_gradients"],
            record_evicted=case["record_evicted"],
            storage=td.SSDStore(folder, cache=40) if case["storage"] == "ssd" else None,
        )
        for table in tables
        if table.dynamic
    }
    return sharded(
        tables,
        optimizer=OPTIMIZERS[case["optimizer"]],
        options=options,
        weighted=case["weighted"],
        use_index_dedup=case["use_index_dedup"],
        fused_params={"output_dtype": SparseType[case["output_dtype"]], "learning_rate": 0.1},
    )


def _loaded(case: Case, model: Any, tables: Sequence[Table]) -> dict[str, _Rows]:
    """Give dynamic tables rows of ids from 0; return them."""
    dynamic = [table for table in tables if table.dynamic]
    rows = {
        f"{_paths(table)}.{table.name}.weight": torch.randn(
            KNOWN, table.dim, generator=seeded(n)
        ).to(TYPES[table.data_type])
        for n, table in enumerate(dynamic)
    }
    if case["loaded_by"] == "insertion":
        insert_static_rows(model, rows)
    else:  # TorchRec wants the weights of static tables, too
        static = {key: of for key, of in model.state_dict().items() if key.endswith(".u.weight")}
        model.load_state_dict({**static, **rows}, strict=False)
    return {
        table.name: _Rows(case, table, of) for table, of in zip(dynamic, rows.values(), strict=True)
    }


def _paths(table: Table) -> str:
    return "sequences.embeddings" if table.pooling == "none" else "bags.embedding_bags"


def _names(tables: Sequence[Table]) -> list[tuple[str, Table, str]]:
    """Return each output, its table and its feature."""
    of = [(table, feature) for table in tables for feature in table.features]
    features = [feature for _, feature in of]
    return [(f"{f}@{t.name}" if features.count(f) > 1 else f, t, f) for t, f in of]


def check(rank: int, case: Case) -> list[str]:
    """Return where outputs or rows differ from those of numpy; collective."""
    with TemporaryDirectory() as folder:
        of_first = [folder]
        dist.broadcast_object_list(of_first)
        found = _differences(rank, case, of_first[0])
        dist.barrier()  # before the folder goes
        return found


def _differences(rank: int, case: Case, folder: str) -> list[str]:
    tables = _tables(case)
    model = _model(case, tables, folder)
    of_tables = _loaded(case, model, tables)
    names = _names(tables)
    features = list(dict.fromkeys(sorted(feature for _, _, feature in names)))
    world = dist.get_world_size()
    trains = case["trainable"] and case["requires_grad"]
    model.requires_grad_(case["requires_grad"])
    tolerance = max(TOLERANCE[case["data_type"]], TOLERANCE[case["output_dtype"]])
    found: list[str] = []

    def drawn(of: int, step: int) -> dict[str, Bags]:
        return {name: _bags(case, of, step, f) for f, name in enumerate(features)}

    def differs(what: str, got: Tensor, expected: Floats) -> None:
        got = got.detach().double()
        if got.shape != expected.shape:
            found.append(f"{what}: shape {tuple(got.shape)}, expected {expected.shape}")
        elif not np.allclose(got, expected, rtol=tolerance, atol=tolerance):
            found.append(f"{what}: off by up to {np.abs(got.numpy() - expected).max():.3g}")

    def compare(
        what: str, outputs: Mapping[str, Tensor], of: Mapping[str, Bags], *, reads: bool
    ) -> None:
        for name, table, feature in names:
            if table.dynamic:
                expected = of_tables[table.name].output(of[feature], reads=reads)
                differs(f"{what} {name}", outputs[name], expected)
                # means by rows are divided by float32, as in TorchRec, and outputs are one tensor
                divided = "mean" in [table.pooling for table in tables]
                if not divided and outputs[name].dtype != TYPES[case["output_dtype"]]:
                    found.append(f"{what} {name}: dtype {outputs[name].dtype}")

    for step in range(STEPS):
        for micro in range(case["micro_batches"]):
            number = 10 * micro + step
            of_ranks = [drawn(of, number) for of in range(world)]
            outputs = model(_batch(case, of_ranks[rank]))
            compare(f"step {step}, output", outputs, of_ranks[rank], reads=not trains)
            if step == micro == 0:
                found += _wrong_static(names, outputs, of_ranks[rank])
            mine = []
            for n, (name, table, feature) in enumerate(names):
                for of in range(world):
                    bags = of_ranks[of][feature]
                    of_table = of_tables[table.name] if table.dynamic else None
                    rows = len(bags.of_samples)
                    if table.pooling == "none":
                        rows = sum(len(bags.ids[bag]) for bag in bags.of_samples)
                    random = seeded(10000 * case["seed"] + 1000 * n + 100 * number + of)
                    gradient = torch.randn(rows, table.dim, generator=random)
                    if case["gradient"] == "expanded":
                        gradient = torch.ones(rows, table.dim)
                    if of_table is not None and trains:
                        of_table.add_gradient(bags, gradient.double().numpy())
                    if of == rank:
                        mine.append((outputs[name].float(), gradient))
            loss = _loss(case, mine)
            if loss.requires_grad:
                loss.backward()
        if trains:
            for of_table in of_tables.values():
                of_table.step(world)
        if case["eval_between"]:
            if case["split"]:
                model.fused_optimizer.step()
            model.eval()
            with torch.no_grad():
                unseen = drawn(rank, 50 + step)
                compare(
                    f"step {step}, in evaluation", model(_batch(case, unseen)), unseen, reads=True
                )
            model.train()
        if (case["ends_step"] or step == STEPS - 1) and not (
            case["eval_between"] and case["split"]
        ):
            model.fused_optimizer.step()
    if case["freeze"]:
        last = drawn(rank, 90)
        compare("frozen output", td.freeze(model)(_batch(case, last)), last, reads=True)
    for name, of_table in of_tables.items():
        ids: list[int] = []
        for part in table_rows(model, name):
            ids += part.ids.tolist()
            expected = np.array([of_table.row(id) for id in part.ids.tolist()])
            differs(f"rows of {name}", part.rows, expected.reshape(part.rows.shape))
        known = {*range(KNOWN)} | {*of_table.rows}
        if sorted(ids) != sorted(known - {of_table.table.padding_idx}):
            found.append(f"ids of {name}: {sorted(ids)}, expected {sorted(known)}")
    return found


def _wrong_static(
    names: Sequence[tuple[str, Table, str]], outputs: Mapping[str, Tensor], of: Mapping[str, Bags]
) -> list[str]:
    """Return which outputs of new static tables are not those of constant rows."""
    found = []
    for name, table, feature in names:
        if table.dynamic:
            continue
        bags = of[feature]
        totals = [
            STATIC_VALUE
            * (
                sum(bags.weights[bag])
                if table.pooling == "sum"
                else np.mean(bags.weights[bag] or 0)
            )
            for bag in bags.of_samples
        ]
        if table.pooling == "none":
            totals = [STATIC_VALUE for bag in bags.of_samples for _ in bags.ids[bag]]
        expected = torch.tensor(totals, dtype=torch.float32)[:, None].expand(-1, table.dim)
        if not torch.allclose(outputs[name].float(), expected, rtol=1e-2, atol=1e-2):
            found.append(f"output {name} of a static table")
    return found


SPACE = Space(
    "torchrec",
    axes={
        "ranks": [1, 2, 3, 4],
        "sharding": BAG_SHARDINGS,
        "pooling": ["sum", "mean", "none"],
        "weighted": [False, True],
        "use_index_dedup": [False, True],
        "vbe": [False, True],
        "padding_idx": [False, True],
        "beside": ["one", "two", "shared", "static"],
        "dim": [48, 96, 5],
        "data_type": ["FP32", "FP16", "BF16"],
        "output_dtype": ["FP32", "FP16", "BF16"],
        "optimizer": list(OPTIMIZERS),
        "policy": list(POLICIES),
        "split": [False, True],
        "micro_batches": [1, 2],
        "ends_step": [True, False],
        "gradient": ["random", "expanded", "strided"],
        "ids_type": ["int64", "int32"],
        "lengths_type": ["int64", "int32"],
        "offsets": [False, True],
        "strided": ["none", "ids", "lengths", "weights", "inverse", "all"],
        "empty": ["none", "bags", "feature", "rank", "batch"],
        "trainable": [True, False],
        "requires_grad": [True, False],
        "eval_default": ["initial", "zeros"],
        "delayed_gradients": [None, "apply"],
        "record_evicted": [False, True],
        "storage": ["none", "ssd"],
        "loaded_by": ["state_dict", "insertion"],
        "eval_between": [False, True],
        "freeze": [False, True],
    },
    constraints=[
        # refused
        lambda use_index_dedup, sharding: (
            not use_index_dedup or sharding in ("row_wise", "table_wise")
        ),
        lambda pooling, sharding: pooling != "none" or sharding in SEQUENCE_SHARDINGS,
        lambda beside, requires_grad: beside != "static" or requires_grad,
        # a column shard has its own mean of squares, as in FBGEMM
        lambda sharding, optimizer: optimizer != "row_wise_adagrad" or sharding in BY_ROWS,
        # columns are divided evenly
        lambda sharding, dim: dim != 5 or sharding in BY_ROWS,
        lambda beside, dim: beside != "static" or dim != 5,
        # TorchRec's own tables lack it, on CPUs or at all
        lambda beside, pooling, weighted: beside != "static" or pooling != "sum" or not weighted,
        lambda beside, empty: beside != "static" or empty != "rank",
        lambda beside, vbe: beside != "static" or not vbe,
        lambda beside, data_type, output_dtype: (
            beside != "static" or (data_type != "BF16" and output_dtype == "FP32")
        ),
        lambda storage, delayed_gradients: storage == "none" or delayed_gradients is None,
        lambda storage, loaded_by: storage == "none" or loaded_by != "state_dict",
        # without a meaning
        lambda pooling, weighted: pooling != "none" or not weighted,
        lambda split, micro_batches: split or micro_batches == 1,
        lambda split, ends_step: ends_step or not split,
        lambda strided, weighted: strided != "weights" or weighted,
        lambda strided, vbe: strided != "inverse" or vbe,
    ],
    check=check,
    hiding={"trainable": [False], "requires_grad": [False], "empty": ["bags", "batch"]},
    public=[DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder, TableOptions],
    without_axis={
        "fused_params": "output_dtype is of it; the others choose an optimizer: test_planner.py",
        "qcomm_codecs_registry": "rounds what is sent: test_sharded_routing.py",
        "tables": "which tables are dynamic: test_chosen_tables.py",
        "options": "each of them is an axis",
        "initializer": "constant rows, which the oracle knows; others: test_initializers.py",
        "feature_policies": "needs admission or expiry: test_feature_policies.py",
        "score_from": "needs eviction: test_scores.py",
    },
)
