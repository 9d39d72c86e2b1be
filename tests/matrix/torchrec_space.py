"""Sharded collections of TorchRec with dynamic tables, against numpy in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from covering import Case, Space, folder_of_ranks
from fbgemm_gpu.split_embedding_configs import SparseType
from numpy_bags import (
    BY_ROWS,
    INITIAL,
    KNOWN,
    NEW,
    OPTIMIZERS,
    POLICIES,
    TOLERANCE,
    TYPES,
    Bags,
    Floats,
    Rows,
    bags_of,
    batch_of,
    tables_of,
)
from seeding import seeded
from sharded_models import (
    BAG_SHARDINGS,
    SEQUENCE_SHARDINGS,
    STATIC_VALUE,
    Model,
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

STEPS = 2


def _loss(case: Case, outputs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the loss with these gradients by output."""
    if case["gradient"] == "expanded":
        return sum((output.sum() for output, _ in outputs), torch.zeros(()))
    if case["gradient"] == "strided":
        return sum(((out.t().contiguous() * g.t()).sum() for out, g in outputs), torch.zeros(()))
    return sum(((output * g).sum() for output, g in outputs), torch.zeros(()))


def model_of(case: Case, tables: Sequence[Table], folder: str, kind: type[Model] = Model) -> Any:
    """Return a sharded model.

    Args:
        folder: of a store.
        kind: of the model.
    """
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
        kind=kind,
        use_index_dedup=case["use_index_dedup"],
        fused_params={"output_dtype": SparseType[case["output_dtype"]], "learning_rate": 0.1},
    )


def loaded(case: Case, model: Any, tables: Sequence[Table]) -> dict[str, Rows]:
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
        table.name: Rows(case, table, of) for table, of in zip(dynamic, rows.values(), strict=True)
    }


def _paths(table: Table) -> str:
    return "sequences.embeddings" if table.pooling == "none" else "bags.embedding_bags"


def names_of(tables: Sequence[Table]) -> list[tuple[str, Table, str]]:
    """Return each output, its table and its feature."""
    of = [(table, feature) for table in tables for feature in table.features]
    features = [feature for _, feature in of]
    return [(f"{f}@{t.name}" if features.count(f) > 1 else f, t, f) for t, f in of]


def check(rank: int, case: Case) -> list[str]:
    """Return where outputs or rows differ from those of numpy; collective."""
    with folder_of_ranks() as folder:
        return _differences(rank, case, folder)


def _differences(rank: int, case: Case, folder: str) -> list[str]:
    tables = tables_of(case)
    model = model_of(case, tables, folder)
    of_tables = loaded(case, model, tables)
    names = names_of(tables)
    features = list(dict.fromkeys(sorted(feature for _, _, feature in names)))
    world = dist.get_world_size()
    trains = case["trainable"] and case["requires_grad"]
    model.requires_grad_(case["requires_grad"])
    tolerance = max(TOLERANCE[case["data_type"]], TOLERANCE[case["output_dtype"]])
    found: list[str] = []

    def drawn(of: int, step: int) -> dict[str, Bags]:
        return {name: bags_of(case, of, step, f) for f, name in enumerate(features)}

    def differs(what: str, got: Tensor, expected: Floats) -> None:
        found.extend(difference(what, got, expected, tolerance))

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
        if case["written"]:
            _write(case, model, of_tables["t"], names, rank, step)
        for micro in range(case["micro_batches"]):
            number = 10 * micro + step
            of_ranks = [drawn(of, number) for of in range(world)]
            outputs = model(batch_of(case, of_ranks[rank]))
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
                    f"step {step}, in evaluation", model(batch_of(case, unseen)), unseen, reads=True
                )
            model.train()
        if (case["ends_step"] or step == STEPS - 1) and not (
            case["eval_between"] and case["split"]
        ):
            model.fused_optimizer.step()
    if case["freeze"]:
        last = drawn(rank, 90)
        compare("frozen output", td.freeze(model)(batch_of(case, last)), last, reads=True)
    return found + wrong_rows(model, of_tables, tolerance)


def _write(
    case: Case,
    model: Any,
    of_table: Rows,
    names: Sequence[tuple[str, Table, str]],
    rank: int,
    step: int,
) -> None:
    """Write rows of ids that ranks and features share, by TorchRec's method; collective."""
    keys = [name for name, table, _ in reversed(names) if table.name == "t"]
    for of in range(dist.get_world_size()):
        random = seeded(10000 * case["seed"] + 500 + 10 * step + of)
        ids = torch.randint(KNOWN + NEW, (5 * len(keys),), generator=random)
        ids[ids == of_table.table.padding_idx] = 0
        rows = torch.randn(len(ids), case["dim"], generator=random)
        if of == rank:
            ids_type, lengths_type = case["ids_type"], case["lengths_type"]
            lengths = torch.tensor([2, 3] * len(keys), dtype=getattr(torch, lengths_type))
            given = ids.to(getattr(torch, ids_type))
            model.write(KeyedJaggedTensor(keys, given, rows, lengths=lengths))
        for id, row in zip(ids.tolist(), rows, strict=True):  # the last one counts
            of_table.write(id, row)


def wrong_rows(model: Any, of_tables: Mapping[str, Rows], tolerance: float) -> list[str]:
    """Return which tables have other ids or rows than numpy; collective."""
    found = []
    for name, of_table in of_tables.items():
        ids: list[int] = []
        for part in table_rows(model, name):
            ids += part.ids.tolist()
            expected = np.array([of_table.row(id) for id in part.ids.tolist()])
            expected = expected.reshape(part.rows.shape)
            found += difference(f"rows of {name}", part.rows, expected, tolerance)
        known = {*range(KNOWN)} | {*of_table.rows}
        if sorted(ids) != sorted(known - {of_table.table.padding_idx}):
            found.append(f"ids of {name}: {sorted(ids)}, expected {sorted(known)}")
    return found


def difference(what: str, got: Tensor, expected: Floats, tolerance: float) -> list[str]:
    """Return how a tensor differs from numpy's."""
    got = got.detach().double()
    if got.shape != expected.shape:
        return [f"{what}: shape {tuple(got.shape)}, expected {expected.shape}"]
    if not np.allclose(got, expected, rtol=tolerance, atol=tolerance):
        return [f"{what}: off by up to {np.abs(got.numpy() - expected).max():.3g}"]
    return []


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
        "written": [False, True],
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
        lambda written, pooling: not written or pooling == "none",
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
