"""Modules and collections against nn.functional's embeddings and numpy's optimizers in float64."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covering import Case, Space, folder_of_ranks
from numpy.typing import NDArray
from oracle import initial_state, optimizer_step
from seeding import seeded
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torch_dynemb as td
from torch_dynemb import ops

Floats = NDArray[np.float64]
# places of ids; the first ones have rows before training, the last ones none until it meets them
IDS = {
    "small": list(range(14)),
    "any": [7, -3, 0, 2**62, -(2**63), 2**63 - 1, 99, -1, 10**12, 5, 6, 1, -(2**31) - 1, 2**32],
}
KNOWN = 9
PADDING = 11  # the place of the padding id
INITIAL = 0.25
STEPS = 3
BATCH = 4
OPTIONS: dict[str, Any] = {"stochastic_rounding": False}
OPTIMIZERS = {
    "sgd": td.SGD(lr=0.5, **OPTIONS),
    "clipped": td.SGD(lr=0.5, weight_decay=0.1, clip_value=0.4, clip_norm=0.7, **OPTIONS),
    "nesterov": td.MomentumSGD(lr=0.2, momentum=0.5, nesterov=True, **OPTIONS),
    # equal gradients do not bring an equal row to exactly 0, where its rate jumps
    "lars": td.LARSSGD(lr=3.0, momentum=0.5, trust_coefficient=0.1, **OPTIONS),
    "adagrad": td.Adagrad(lr=0.5, initial_accumulator_value=0.1, **OPTIONS),
    "row_wise_adagrad": td.RowWiseAdagrad(lr=0.5, **OPTIONS),
    "rmsprop": td.RMSprop(lr=0.1, eps=0.1, momentum=0.5, maximize=True, **OPTIONS),
    "row_wise_rmsprop": td.RowWiseRMSprop(lr=0.1, eps=0.1, ar_alpha=1.0, **OPTIONS),
    "adam": td.Adam(lr=0.1, eps=0.1, **OPTIONS),
    "row_steps": td.Adam(lr=0.1, eps=0.1, row_steps=True, **OPTIONS),
    "adamw": td.AdamW(lr=0.1, eps=0.1, weight_decay=0.2, **OPTIONS),
    "amsgrad": td.AMSGrad(lr=0.1, eps=0.1, **OPTIONS),
    "lamb": td.LAMB(lr=0.1, eps=0.1, weight_decay=0.1, **OPTIONS),
}
POLICIES = {
    "none": td.Policy(),
    "room": td.Policy(score="step", capacity=400),
    "frequency": td.Policy(score="frequency", capacity=400, on_full="evict"),
    "ttl": td.Policy(ttl=10**6),
    "admit": td.Policy(admission=td.AdmitFrequent(1)),
}
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
DIMS = (5, 5)  # of tables


@dataclass(frozen=True)
class Bags:
    """Bags of a feature: places of ids, and their weights."""

    places: list[list[int]]
    weights: list[list[float]]

    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return places, offsets [bags] and weights."""
        lengths = torch.tensor([0, *map(len, self.places)])
        return (
            torch.tensor([place for bag in self.places for place in bag], dtype=torch.int64),
            lengths.cumsum(0)[:-1],
            torch.tensor([w for bag in self.weights for w in bag], dtype=torch.float64),
        )


def _pools(case: Case) -> bool:
    return case["kind"] in ("bag", "bag_collection")


def _features(case: Case) -> list[int]:
    """Return the table of each feature."""
    if case["kind"] in ("embedding", "bag"):
        return [0]
    return [0, 1] if case["tables"] == "two" else [0, 0]


def _drawn(case: Case, number: int, rank: int) -> list[Bags]:
    """Return the bags of each feature."""
    found = []
    for feature in range(len(_features(case))):
        random = seeded(10000 * case["seed"] + 5000 * rank + 10 * number + feature)
        batch = 0 if case["empty"] == "batch" and (number + rank) % 2 == 0 else BATCH
        lengths = torch.randint(0, 4, (batch,), generator=random).tolist()
        if case["form"] not in ("ragged", "keyed"):
            lengths = [3] * batch
        if case["empty"] == "bags" and (number + rank) % 2 == 0:
            lengths = [0] * batch
        elif batch and lengths[0]:
            lengths[0] = 3
        places = [torch.randint(0, 14, (n,), generator=random).tolist() for n in lengths]
        if batch and lengths[0]:
            places[0] = [1, 1, PADDING]  # an id twice
        weights = [
            ((1 + torch.randint(0, 8, (n,), generator=random)) / 4).tolist() for n in lengths
        ]
        found.append(Bags(places, weights))
    return found


def _strided(tensor: Tensor) -> Tensor:
    """Return the same values, each beside another value."""
    return torch.stack([tensor, torch.full_like(tensor, 3)], dim=-1)[..., 0]


def _ids(case: Case) -> list[int]:
    return IDS["small" if case["ids_type"] == "int32" else case["ids"]]


def _input(case: Case, of_features: Sequence[Bags]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return the arguments of a lookup, and the leaves with weights."""
    known = torch.tensor(_ids(case), dtype=getattr(torch, case["ids_type"]))
    kind, form = case["kind"], case["form"]
    leaves: list[Tensor] = []

    def strided(tensor: Tensor, name: str) -> Tensor:
        return _strided(tensor) if case["strided"] in (name, "all") else tensor

    def weights_of(weights: Tensor, shape: Any) -> Tensor:
        leaf = weights.to(TYPES[case["weights_type"]]).requires_grad_(case["weights_learn"])
        leaves.append(leaf)
        return strided(leaf, "weights").view(shape)

    def offsets_of(offsets: Tensor, count: int, *, last: bool) -> Tensor:
        if last:
            offsets = torch.cat([offsets, torch.tensor([count])])
        return strided(offsets.to(getattr(torch, case["offsets_type"])), "offsets")

    if form == "keyed":
        bags = Bags(
            [bag for of in of_features for bag in of.places],
            [bag for of in of_features for bag in of.weights],
        )
        places, offsets, weights = bags.flat()
        names = ["a", "b"][: len(of_features)]
        jagged = td.KeyedJagged(
            names,
            strided(known[places], "ids"),
            offsets_of(offsets, len(places), last=True),
            weights_of(weights, -1) if case["weighted"] else None,
        )
        return (jagged,), leaves
    parts = []
    for of in of_features:
        places, offsets, weights = of.flat()
        shape = {"flat": (-1,), "ragged": (-1,), "matrix": (len(of.places), 3)}.get(
            form, (len(of.places), 3, 1)
        )
        ids = strided(known[places].view(shape), "ids")
        if form != "ragged":
            parts.append((ids, None, weights, shape))
        else:
            last = case["include_last_offset"] or kind == "bag_collection"
            parts.append((ids, offsets_of(offsets, len(places), last=last), weights, shape))
    if kind == "embedding":
        return (parts[0][0],), leaves
    if kind == "bag":
        ids, offsets, weights, shape = parts[0]
        given = weights_of(weights, shape) if case["weighted"] else None
        return (ids, offsets, given), leaves
    ragged = form == "ragged"
    return (
        {
            name: (part[0], part[1]) if ragged else part[0]
            for name, part in zip("ab", parts, strict=False)
        },
    ), leaves


def _module(case: Case, folder: str) -> Any:
    config = OPTIMIZERS[case["optimizer"]]
    rows = {
        "initializer": td.Constant(INITIAL),
        "padding_idx": _ids(case)[PADDING] if case["padding_idx"] else None,
        "eval_default": case["eval_default"],
        "policy": POLICIES[case["policy"]],
        "dtype": TYPES[case["dtype"]],
    }
    storage = {"none": None, "ssd": td.SSDStore(f"{folder}/rows", cache=40)}[case["storage"]]
    options = {
        "optimizer": config,
        "trainable": case["trainable"],
        "split": case["split"],
        "output_dtype": TYPES[case["output_dtype"]],
        "max_rows": case["max_rows"],
        "memory_budget": case["memory_budget"],
        "process_group": dist.group.WORLD if case["ranks"] else None,
    }
    if case["kind"] == "embedding":
        return td.DynamicEmbedding(DIMS[0], name="t", storage=storage, **rows, **options)
    if case["kind"] == "bag":
        return td.DynamicEmbeddingBag(
            DIMS[0],
            mode=case["mode"],
            include_last_offset=case["include_last_offset"],
            name="t",
            storage=storage,
            **rows,
            **options,
        )
    names = [["a"], ["b"]] if case["tables"] == "two" else [["a", "b"]]
    tables = [
        td.TableConfig(f"t{n}", DIMS[n], feature_names=of, storage=storage, **rows)
        for n, of in enumerate(names)
    ]
    if case["kind"] == "collection":
        return td.DynamicEmbeddingCollection(tables, **options)
    return td.DynamicEmbeddingBagCollection(tables, mode=case["mode"], **options)


class _Rows:
    """Rows of a table by place, their optimizer state, and what they get of gradients."""

    def __init__(self, case: Case, dim: int, rows: Floats) -> None:
        self.case, self.rows = case, rows
        self.config = OPTIMIZERS[case["optimizer"]]
        self.met = set(range(KNOWN))
        self.state: dict[int, list[Floats]] = {}
        self.steps, self.touched = 0, set[int]()
        self.gradient = np.zeros_like(rows)

    def weight(self, *, reads: bool) -> Tensor:
        """Return float64 [places, dim]; ``reads``: places without a row get none."""
        rows = self.rows.copy()
        if reads and self.case["eval_default"] == "zeros":
            rows[[place for place in range(len(rows)) if place not in self.met]] = 0.0
        if self.case["padding_idx"]:
            rows[PADDING] = 0.0
        return torch.from_numpy(rows).requires_grad_()

    def add(self, gradient: Tensor, of_ranks: Sequence[Bags]) -> None:
        self.gradient += gradient.numpy()
        self.touched |= {place for bags in of_ranks for bag in bags.places for place in bag}

    def step(self) -> None:
        if self.case["padding_idx"]:
            self.touched.discard(PADDING)
        self.steps += 1
        for place in self.touched:
            state = self.state.get(place) or initial_state(self.config, self.rows.shape[1])
            row, self.state[place] = optimizer_step(
                self.config, self.steps, self.rows[place], self.gradient[place], state
            )
            rounded = torch.from_numpy(row).to(TYPES[self.case["dtype"]])
            self.rows[place] = rounded.double().numpy()
        self.met |= self.touched
        self.touched, self.gradient = set(), np.zeros_like(self.rows)


def _expected(case: Case, weight: Tensor, bags: Bags, weights: Tensor) -> Tensor:
    """Return what nn.functional gives."""
    places, offsets, _ = bags.flat()
    padding_idx = PADDING if case["padding_idx"] else None
    if not _pools(case):
        return F.embedding(places, weight, padding_idx)
    if not case["weighted"]:
        return F.embedding_bag(places, weight, offsets, mode=case["mode"], padding_idx=padding_idx)

    def sums(weight: Tensor) -> Tensor:
        return F.embedding_bag(
            places, weight, offsets, mode="sum", per_sample_weights=weights, padding_idx=padding_idx
        )

    if case["mode"] == "sum":
        return sums(weight)
    totals = sums(torch.ones_like(weight))
    return sums(weight) / torch.where(totals == 0, 1.0, totals)


def _outputs(case: Case, module: Any, output: Any) -> list[Tensor]:
    """Return what each feature gets, as [ids or bags, dim]."""
    if case["kind"] == "collection":
        output = [output[name] for name in "ab"]
    elif case["kind"] == "bag_collection":
        output = [module.split(output)[name] for name in "ab"]
    else:
        output = [output]
    return [of.reshape(-1, of.shape[-1]) for of in output]


def _reloaded(case: Case, module: Any, folder: str) -> Any:
    if case["reload"] == "deepcopy":
        return copy.deepcopy(module)
    if case["reload"] == "pickle":
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    other = _module(case, folder)
    if case["reload"] == "state_dict":
        other.load_state_dict(module.state_dict())
    else:
        td.checkpoint.save(f"{folder}/saved", module)
        td.checkpoint.load(f"{folder}/saved", other)
    return other


def _run(case: Case, module: Any) -> Callable[..., Any]:
    """Return the module, as it is called."""
    called = module
    if case["run"] == "aot_eager":
        torch._dynamo.reset()
        called = torch.compile(module, backend="aot_eager")
    if case["recomputes"] == "no":
        return called

    def recomputed(*arguments: Any) -> Any:
        shift = torch.zeros((), requires_grad=True)
        reentrant = case["recomputes"] == "reentrant"

        def shifted(shift: Tensor, *arguments: Any) -> Any:
            output = called(*arguments)
            if isinstance(output, Mapping):
                return tuple(of + shift.to(of.dtype) for of in output.values())
            return output + shift.to(output.dtype)

        output = checkpoint(shifted, shift, *arguments, use_reentrant=reentrant)
        return dict(zip("ab", output, strict=True)) if case["kind"] == "collection" else output

    return recomputed


def _exported(case: Case, module: Any, table: int) -> dict[int, Tensor]:
    """Return the rows of a table by id, of all ranks."""
    rows = {
        id: row
        for part in module.group.export(table)
        for id, row in zip(part.ids.tolist(), part.rows, strict=True)
    }
    of_ranks: list[Any] = [rows]
    if case["ranks"]:
        of_ranks = [None] * case["ranks"]
        dist.all_gather_object(of_ranks, rows)
    return {id: row for of in of_ranks for id, row in of.items()}


def _loss(case: Case, output: Tensor, gradient: Tensor) -> Tensor:
    """Return a loss with this gradient by the output."""
    if case["gradient"] == "strided":
        return (output.t().contiguous() * gradient.t()).sum()
    if case["gradient"] == "expanded":
        return output.sum()
    return (output * gradient).sum()


def _backward(case: Case) -> AbstractContextManager[Any]:
    if case["run"] == "compiled_autograd":
        return torch._dynamo.compiled_autograd._enable(lambda graph: graph)
    return nullcontext()


def check(rank: int, case: Case) -> list[str]:
    """Return where outputs, gradients of weights or rows differ from stock PyTorch's."""
    with folder_of_ranks() as folder:
        return _differences(rank, case, folder)


def _differences(rank: int, case: Case, folder: str) -> list[str]:
    module, found = _module(case, folder), list[str]()
    world = max(case["ranks"], 1)
    dtype = TYPES[case["dtype"]]
    of_tables = []
    for table in dict.fromkeys(_features(case)):
        random = torch.randn(KNOWN, DIMS[table], generator=seeded(table)).to(dtype)
        known = torch.tensor(_ids(case)[:KNOWN])
        own = ops.id_owners(known, parts=world) == rank
        module.group.insert_or_assign(table, known[own], random[own])
        new = torch.full((len(_ids(case)) - KNOWN, DIMS[table]), INITIAL)
        of_tables.append(_Rows(case, DIMS[table], torch.cat([random, new]).double().numpy()))
    low = case["output_dtype"] if case["autocast"] == "none" else "bfloat16"
    tolerance = max(TOLERANCE[case["dtype"]], TOLERANCE[low], TOLERANCE[case["weights_type"]])

    def differs(what: str, got: Tensor, expected: Tensor, within: float = tolerance) -> None:
        if got.shape != expected.shape:
            found.append(f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
        elif not torch.allclose(got.double(), expected.double(), rtol=within, atol=within):
            off = (got.double() - expected.double()).abs().max()
            found.append(f"{what}: off by up to {off:.3g}")

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=case["autocast"] != "none")

    def looked_up(called: Any, number: int, *, reads: bool) -> tuple[Any, ...]:
        """Look up; return what each feature gets: output on this rank, and what all ranks expect.

        Also the leaves with weights, and what theirs are expected to be.
        """
        of_ranks = [_drawn(case, number, of) for of in range(world)]
        arguments, leaves = _input(case, of_ranks[rank])
        with autocast:
            outputs = _outputs(case, module, called(*arguments))
        weights = [[bags.flat()[2].requires_grad_() for bags in of] for of in of_ranks]
        parts = []
        for f, output in enumerate(outputs):
            of_table = of_tables[_features(case)[f]]
            weight = of_table.weight(reads=reads)
            expected = [
                _expected(case, weight, of[f], given[f])
                for of, given in zip(of_ranks, weights, strict=True)
            ]
            differs(f"lookup {number}, output {f}", output.detach(), expected[rank].detach())
            if output.dtype != TYPES[case["output_dtype"]]:
                found.append(f"lookup {number}, output {f}: dtype {output.dtype}")
            parts.append((output, expected, weight, [of[f] for of in of_ranks], of_table))
        return parts, leaves, weights[rank]

    trains = case["trainable"]
    called = _run(case, module)
    number = 0
    for step in range(STEPS):
        for _ in range(case["micro_batches"]):
            all_parts, pairs = [], []
            for _ in range(case["lookups"]):
                number += 1
                all_parts.append(looked_up(called, number, reads=not trains))
            losses, expected_losses = [], []
            for parts, leaves, weights in all_parts:
                pairs += [(leaves, weights)] if leaves and case["weights_learn"] else []
                for n, (output, expected, *_) in enumerate(parts):
                    for of, of_rank in enumerate(expected):
                        random = seeded(5000 * of + 7 * number + n)
                        gradient = torch.randint(1, 5, of_rank.shape, generator=random) / 4
                        if case["gradient"] == "expanded":
                            gradient = torch.ones(of_rank.shape)
                        expected_losses.append((of_rank * gradient.double()).sum())
                        if of == rank:
                            losses.append(_loss(case, output.float(), gradient))
            loss = sum(losses, torch.zeros(()))
            if loss.requires_grad:
                with _backward(case):
                    loss.backward()
            sum(expected_losses, torch.zeros(())).backward()
            for leaves, weights in pairs:
                got = torch.cat(
                    [torch.zeros_like(of) if of.grad is None else of.grad for of in leaves]
                )
                differs(
                    f"step {step}, gradient of weights", got, torch.cat([of.grad for of in weights])
                )
            for parts, *_ in all_parts:
                for _, _, weight, of_ranks, of_table in parts:
                    of_table.add(weight.grad / world, of_ranks)
        if trains:
            for of_table in of_tables:
                of_table.step()
        for of_table in of_tables:
            of_table.touched, of_table.gradient = set(), np.zeros_like(of_table.rows)
        if (case["ends_step"] or case["split"]) and trains:
            module.optimizer.step()
        if step == 0 and case["reload"] != "no":
            module = _reloaded(case, module, folder)
            called = _run(case, module)
        if case["eval_between"]:
            module.eval()
            with torch.no_grad():
                looked_up(module, 100 + step, reads=True)
            module.train()
    if case["freeze"] != "no":
        frozen = td.freeze(module)
        looked_up(frozen, 200, reads=True)
    for table, of_table in enumerate(of_tables):
        of_group = _exported(case, module, table)
        met = {_ids(case)[place] for place in of_table.met}
        if set(of_group) != met:
            found.append(f"ids of table {table}: {sorted(of_group)}, expected {sorted(met)}")
            continue
        places = sorted(of_table.met)
        got = torch.stack([of_group[_ids(case)[place]] for place in places])
        differs(f"rows of table {table}", got, torch.from_numpy(of_table.rows[places]))
    return found


SPACE = Space(
    "modules",
    axes={
        "ranks": [0, 1, 2],  # 0: without process_group
        "kind": ["embedding", "bag", "collection", "bag_collection"],
        "form": ["flat", "matrix", "ragged", "keyed", "cube"],
        "mode": ["sum", "mean"],
        "weighted": [False, True],
        "weights_learn": [False, True],
        "weights_type": ["float32", "bfloat16", "float16"],
        "include_last_offset": [False, True],
        "padding_idx": [False, True],
        "tables": ["two", "one"],
        "ids": ["small", "any"],
        "ids_type": ["int64", "int32"],
        "offsets_type": ["int64", "int32"],
        "strided": ["none", "ids", "offsets", "weights", "all"],
        "empty": ["none", "bags", "batch"],
        "dtype": list(TYPES),
        "output_dtype": list(TYPES),
        "optimizer": list(OPTIMIZERS),
        "split": [False, True],
        "micro_batches": [1, 2],
        "lookups": [1, 2],
        "ends_step": [True, False],
        "gradient": ["random", "expanded", "strided"],
        "autocast": ["none", "bfloat16"],
        "run": ["eager", "aot_eager", "compiled_autograd"],
        "recomputes": ["no", "not_reentrant", "reentrant"],
        "trainable": [True, False],
        "policy": list(POLICIES),
        "storage": ["none", "ssd"],
        "eval_default": ["initial", "zeros"],
        "eval_between": [False, True],
        "freeze": ["no", "yes"],
        "reload": ["no", "state_dict", "deepcopy", "pickle", "checkpoint"],
        "max_rows": [None, 1000],
        "memory_budget": [None, "1MB"],
    },
    constraints=[
        lambda kind, form: (
            form
            in {
                "embedding": ("flat", "matrix", "cube"),
                "bag": ("matrix", "ragged"),
                "collection": ("flat", "matrix", "cube", "keyed"),
                "bag_collection": ("matrix", "ragged", "keyed"),
            }[kind]
        ),
        # without a meaning
        lambda kind, mode: mode == "sum" or kind in ("bag", "bag_collection"),
        lambda kind, form, weighted: (
            not weighted or kind == "bag" or (kind == "bag_collection" and form == "keyed")
        ),
        lambda weighted, weights_learn: weighted or not weights_learn,
        lambda weighted, weights_type: weighted or weights_type == "float32",
        lambda kind, form, include_last_offset: (
            not include_last_offset or (kind == "bag" and form == "ragged")
        ),
        lambda kind, tables: tables == "two" or "collection" in kind,
        lambda ids, ids_type: ids == "small" or ids_type == "int64",
        lambda form, offsets_type: offsets_type == "int64" or form in ("ragged", "keyed"),
        lambda form, strided: strided != "offsets" or form in ("ragged", "keyed"),
        lambda weighted, strided: strided != "weights" or weighted,
        lambda form, empty: empty != "bags" or form in ("ragged", "keyed"),
        lambda split, micro_batches: split or micro_batches == 1,
        lambda split, ends_step: ends_step or not split,
        lambda max_rows, memory_budget: max_rows is None or memory_budget is None,
        # refused
        lambda storage, reload: storage == "none" or reload == "no",
        # a reentrant checkpoint gives no gradient to what is inside of arguments
        lambda recomputes, kind, weights_learn: (
            recomputes != "reentrant" or not weights_learn or kind == "bag"
        ),
        lambda run, recomputes: run == "eager" or recomputes == "no",
        lambda run, max_rows: run != "aot_eager" or max_rows is not None,
        lambda run, storage: run != "aot_eager" or storage == "none",  # it copies tensors
        lambda run, lookups: run != "aot_eager" or lookups == 1,  # two functions
        # autocast refuses to concatenate float16, which the compiled gradient of a split does
        lambda kind, output_dtype, autocast, run: (
            (kind, output_dtype, run) != ("collection", "float16", "aot_eager")
            or autocast == "none"
        ),
        # documented: the forward of a reentrant checkpoint only reads, and each has a backward
        lambda recomputes, eval_default: recomputes != "reentrant" or eval_default == "initial",
        lambda recomputes, lookups, split: recomputes != "reentrant" or lookups == 1 or split,
    ],
    check=check,
    hiding={"trainable": [False], "empty": ["bags", "batch"]},
    public=[
        td.DynamicEmbedding,
        td.DynamicEmbeddingBag,
        td.DynamicEmbeddingCollection,
        td.DynamicEmbeddingBagCollection,
        td.SingleTableOptions,
        td.ModuleOptions,
        td.TableConfig,
    ],
    without_axis={
        "embedding_dim": "each table has its own",
        "name": "seeds random rows, which are constant here: test_initializers.py",
        "initializer": "constant rows, which the oracle knows; others: test_initializers.py",
        "device": "--device: test_modules.py",
        "process_group": "axis ranks",
        "scores": "needs eviction: test_combined_scores.py",
        "input": "axis form",
        "features": "axis form",
        "offsets": "axis form",
        "per_sample_weights": "axis weighted",
        "feature_names": "axis tables",
        "feature_policies": "needs admission or expiry: test_feature_policies.py",
        "shard": "TorchRec's: torchrec_space.py",
    },
)
