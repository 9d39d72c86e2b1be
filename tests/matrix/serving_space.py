"""Models that serve, frozen or live, with rows of all formats, against rows in numpy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from covering import Case, Space
from numpy.typing import NDArray
from packages_of_cases import Package
from seeding import seeded
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import delta_log, recis, serving
from torch_dynemb.delta_log import DeltaLog

KNOWN = [0, -1, 2**63 - 1, -(2**63), *range(4, 14)]
PADDING = 4  # one of these
MISSING = [100, 101, 102]
NEW = [200, 201]
INITIAL, GIVEN = 0.25, 0.5  # rows of missing ids: by the initializer, or another value
KEPT = 6  # ids with the highest scores
FEW = 5  # changes in memory of rows in a file, which is then written anew
Floats = NDArray[np.float64]

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1.6e-2}
BAGS = ("bag", "bags", "recis")
PACKAGES = ("package", "package_cpp")
POLICIES = {
    "none": td.Policy(),
    "custom": td.Policy(score="custom", capacity=400),
    "ttl": td.Policy(score=("timestamp", "custom"), ttl=25),
    "admission": td.Policy(admission=td.AdmitFrequent(2)),
}


@dataclass(frozen=True)
class Batch:
    """Ids and weights of each bag."""

    ids: list[list[int]]
    weights: list[list[float]]

    def tensors(self, case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ids, offsets with the last one, and weights."""
        ids = torch.tensor(
            [id for bag in self.ids for id in bag], dtype=getattr(torch, case["ids"])
        )
        lengths = torch.tensor([0, *map(len, self.ids)])
        weights = torch.tensor([w for bag in self.weights for w in bag], dtype=torch.float32)
        if case["strided"]:
            ids = torch.stack([ids, ids + 1], dim=-1)[:, 0]
            weights = torch.stack([weights, weights + 1], dim=-1)[:, 0]
        weights.requires_grad_(case["weights_learn"])  # as those of a layer in front
        return ids, lengths.cumsum(0), weights if case["weighted"] else None


class Rows:
    """Rows of a table by id, as numbers of its dtype, and how far others may be off."""

    def __init__(self, case: Case, dim: int) -> None:
        self.case, self.dim = case, dim
        self.of: dict[int, Floats] = {}

    def set(self, ids: list[int], rows: Tensor, *, in_table: bool = True) -> None:
        """Set rows: of the table, or of what serves and has a format of its own."""
        stored = rows.to(TYPES[self.case["dtype"]]) if in_table else rows
        self.of |= dict(zip(ids, stored.double().numpy(), strict=True))

    def read(self, id: int) -> tuple[Floats, float]:
        """Return a row, and how far it may be off."""
        if id in self.of:
            return self.of[id], self.rounding(self.of[id])
        default = {"initial": INITIAL, "zeros": 0.0, "tensor": GIVEN}[self.case["eval_default"]]
        if self.case["kind"] == "recis":
            default = 0.0
        return np.full(self.dim, default), 0.0

    def rounding(self, row: Floats) -> float:
        """Return how far a row of a format may be off, by what the page says of it."""
        largest, span = np.abs(row).max(), row.max() - row.min()
        return {
            None: 0.0,
            "fp16": largest * 2**-11,
            "bf16": largest * 2**-8,
            "int8": span / 255 / 2 * 1.001,
            "fp8": largest / 16 * 1.001,
            "int4": span / 15 / 2 + (largest + span) * 2**-10,  # of 16-bit scale and bias, too
        }[self.case["rows"]]

    def output(self, batch: Batch) -> tuple[Floats, Floats]:
        """Return sums or means of bags, or rows, and how far these may be off."""
        pooled = self.case["kind"] in BAGS
        found = []
        for ids, weights in zip(batch.ids, batch.weights, strict=True):
            of_bag = [
                (*self.read(id), weight)
                for id, weight in zip(ids, weights, strict=True)
                if id != PADDING or not self.case["padding_idx"]
            ]
            if not pooled:
                zeros = (np.zeros(self.dim), 0.0)
                found += [
                    zeros if self.case["padding_idx"] and id == PADDING else self.read(id)
                    for id in ids
                ]
                continue
            total = sum(weight for *_, weight in of_bag) if self.case["mode"] == "mean" else 1.0
            value = sum((row * (w / total) for row, _, w in of_bag), np.zeros(self.dim))
            found.append((value, sum(off * w / total for _, off, w in of_bag)))
        return (
            np.array([value for value, _ in found]).reshape(-1, self.dim),
            np.array([off for _, off in found]).reshape(-1, 1),
        )


class Model(nn.Module):
    """A model that is its tables, which may have several names."""

    def __init__(self, tables: nn.Module, names: int) -> None:
        super().__init__()
        self.tables = tables
        if names == 2:
            self.again = tables

    def forward(self, *given: Any) -> Any:
        """Return the tables' output."""
        return self.tables(*given)


class Served:
    """A model with one or two tables, and what their rows are."""

    def __init__(self, case: Case, folder: str) -> None:
        self.case, self.kind = case, case["kind"]
        dims = {"t": case["dim"], "u": case["dim"] if self.kind == "sequences" else 8}
        self.names = ["t", "u"] if self.kind in ("bags", "sequences") else ["t"]
        self.rows = {name: Rows(case, dims[name]) for name in self.names}
        self.model = Model(self._module(dims, folder), case["names"])
        of: Any = self.model.tables
        if self.kind == "recis":
            (of,) = recis.filter_out_sparse_param(self.model).values()
        self.group: td.TableGroup = of.group
        if self.group.config.keeps_time:
            self.group.clock.set_now(100)
        expires = case["policy"] == "ttl"
        self.write(KNOWN[: len(KNOWN) // 2], seed=4 if expires else 1)
        if expires:
            self.group.clock.set_now(130)
            for rows in self.rows.values():
                rows.of = {}
        self.write(KNOWN[len(KNOWN) // 2 :], seed=2)

    def _module(self, dims: Mapping[str, int], folder: str) -> nn.Module:
        case = self.case
        default = {"tensor": GIVEN}
        table: dict[str, Any] = {
            "initializer": td.Constant(INITIAL),
            "padding_idx": PADDING if case["padding_idx"] else None,
            "policy": POLICIES[case["policy"]],
            "dtype": TYPES[case["dtype"]],
            "storage": td.SSDStore(folder, segment="1MiB") if case["storage"] == "ssd" else None,
        }
        module: dict[str, Any] = {
            "optimizer": td.SGD(lr=0.1),
            "split": case["split"],
            "output_dtype": TYPES[case["output_dtype"]],
        }

        def eval_default(dim: int) -> Any:
            value = default.get(case["eval_default"])
            return case["eval_default"] if value is None else torch.full((dim,), value)

        if self.kind == "embedding":
            of = {"eval_default": eval_default(dims["t"]), **table, **module}
            return td.DynamicEmbedding(dims["t"], name="t", **of)
        if self.kind == "bag":
            of = {"eval_default": eval_default(dims["t"]), **table, **module}
            return td.DynamicEmbeddingBag(dims["t"], name="t", mode=case["mode"], **of)
        if self.kind == "recis":
            return recis.EmbeddingEngine(
                {
                    "t": recis.EmbeddingOption(
                        dims["t"],
                        dtype=TYPES[case["dtype"]],
                        shared_name="t",
                        combiner=case["mode"],
                        initializer=td.Constant(INITIAL),
                    )
                }
            )
        configs = [
            td.TableConfig(name, dim, eval_default=eval_default(dim), **table)
            for name, dim in dims.items()
        ]
        if self.kind == "bags":
            return td.DynamicEmbeddingBagCollection(configs, mode=case["mode"], **module)
        return td.DynamicEmbeddingCollection(configs, **module)

    def write(self, ids: list[int], seed: int) -> None:
        """Give ids rows, the scores of which rise with their place in the list."""
        ids = [id for id in ids if id != PADDING or not self.case["padding_idx"]]
        for table, (_, rows) in enumerate(self.rows.items()):
            of_ids = torch.randn(len(ids), rows.dim, generator=seeded(100 * seed + table))
            scores = torch.arange(len(ids)) + 100 * seed
            keeps = "custom" in self.group.config.tables[table].policy.scores
            self.group.insert_or_assign(
                table, torch.tensor(ids), of_ids, scores=scores if keeps else None
            )
            rows.set(ids, of_ids)

    def erase(self, ids: list[int]) -> None:
        """Remove ids."""
        for table, rows in enumerate(self.rows.values()):
            self.group.erase(table, torch.tensor(ids))
            for id in ids:
                rows.of.pop(id, None)

    @property
    def least_kept(self) -> int:
        """Return the least score of the ids that stay."""
        return 200 + len(KNOWN) - len(KNOWN) // 2 - KEPT

    def keep_only(self) -> None:
        """Keep the ids with the highest scores."""
        for rows in self.rows.values():
            kept = [*rows.of][-KEPT:]
            rows.of = {id: row for id, row in rows.of.items() if id in kept}

    def __call__(self, model: Any, batch: Mapping[str, Batch]) -> dict[str, Tensor]:
        """Run a served model."""
        case, tables = self.case, model
        given = {name: of.tensors(case) for name, of in batch.items()}
        ids, offsets, weights = given["t"]
        if self.kind == "embedding":
            return {"t": tables(ids)}
        if self.kind == "bag":
            if case["form"] == "padded":  # two ids in each bag
                shape = (len(batch["t"].ids), 2)
                return {
                    "t": tables(
                        ids.view(shape), None, None if weights is None else weights.view(shape)
                    )
                }
            return {"t": tables(ids, offsets[:-1], weights)}
        if self.kind == "recis":
            ragged = {n: recis.RaggedTensor(i, o, w) for n, (i, o, w) in given.items()}
            return dict(tables(ragged))
        if case["form"] == "padded":
            features: Any = {n: i.view(-1, 2) for n, (i, *_) in given.items()}
        else:
            features = td.KeyedJagged(
                [*given],
                torch.cat([i for i, *_ in given.values()]),
                torch.cat([offsets[:1], *_following([o for _, o, _ in given.values()])]),
                torch.cat([w for *_, w in given.values()]) if case["weighted"] else None,
            )
        found = tables(features)
        if self.kind == "sequences":
            return {name: of.reshape(-1, of.shape[-1]) for name, of in found.items()}
        dims = [rows.dim for rows in self.rows.values()]
        return dict(zip(self.names, found.split(dims, dim=1), strict=True))


def _following(offsets: list[Tensor]) -> list[Tensor]:
    """Return offsets that count on from one table to the next."""
    found, begin = [], 0
    for of in offsets:
        found.append(of[1:] + begin)
        begin += int(of[-1])
    return found


def _batch(case: Case, seed: int) -> Batch:
    random = seeded(100 * case["seed"] + seed)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=random))

    known = KNOWN if case["ids"] == "int64" else [id for id in KNOWN if abs(id) < 2**31]
    pool = {"none": known, "some": [*known, *MISSING], "all": MISSING}[case["absent"]]
    lengths = [
        2 if case["form"] == "padded" else (draw(4) if n else 3) for n in range(case["batch"])
    ]
    ids = [[pool[draw(len(pool))] for _ in range(length)] for length in lengths]
    if ids and case["absent"] != "all":
        ids[0][0] = PADDING
    weights = [[(1 + draw(8)) / 4 if case["weighted"] else 1.0 for _ in bag] for bag in ids]
    return Batch(ids, weights)


def check(rank: int, case: Case) -> list[str]:
    """Return where outputs of a served model differ from numpy."""
    case = meant(case)
    with TemporaryDirectory() as folder:
        return _differences(case, Path(folder))


def _differences(case: Case, folder: Path) -> list[str]:
    served = Served(case, str(folder / "rows"))
    log = DeltaLog(folder / "log", rows=case["log_rows"])
    if case["updated"] == "log":
        log.attach(served.model)
    keep = {
        None: None,
        "top": td.Top(KEPT, by="custom"),
        "at_least": td.AtLeast(served.least_kept, by="custom"),
    }[case["keep"]]
    if keep is not None:
        served.keep_only()
    if case["how"] == "live":
        if case["served_from"] == "file":
            storage = _storage(case, folder / "served")
            frozen = td.freeze(served.model, rows=case["rows"], keep=keep, storage=storage)
            model = serving.live(frozen, headroom=FEW)
        else:
            model = serving.live(served.model, headroom=10, rows=case["rows"], keep=keep)
        if case["updated"] == "log":
            follower = delta_log.follow(folder / "log", model)
            served.write([*KNOWN[-3:], *NEW], seed=3)
            served.erase(KNOWN[:2])
            log.publish()
            log.flush()
            follower.update()
        elif case["updated"] == "update":
            (tables,) = serving.live_tables(model).values()
            _update(tables, served, [*tables.sizes()])
        log.close()
        return _wrong_outputs(case, served, model)
    if case["how"] in PACKAGES:
        return _wrong_outputs(case, served, _package(case, served, folder, keep))
    frozen = [
        _copied(
            case,
            td.freeze(
                served.model,
                rows=case["rows"],
                keep=keep,
                missing=missing,
                storage=_storage(case, folder / f"served{missing}"),
            ),
        )
        for missing in (False, True)
    ]
    return [text for model in frozen for text in _wrong_outputs(case, served, model)]


def _package(case: Case, served: Served, folder: Path, keep: Any) -> Package:
    """Return a package of a frozen model, or one with rows that have been updated."""
    in_cpp, options = case["how"] == "package_cpp", dict[str, Any]()
    live = case["updated"] == "update"
    storage = _storage(case, folder / "served")
    if live and storage is None:
        model = served.model.eval()
    else:
        model = td.freeze(served.model, rows=case["rows"], keep=keep, storage=storage)
    if live and storage is not None:
        options = {"headroom": FEW}
    elif live:
        options = {"headroom": 10, "rows": case["rows"], "keep": keep}
    elif case["converted"]:
        model.to(TYPES[case["converted"]])
    given = list[Any]()

    def example(*inputs: Any) -> Any:
        given.extend(inputs)
        return model(*inputs)

    with torch.no_grad():
        served(example, {name: _batch(case, n) for n, name in enumerate(served.names)})
    package = Package(model, folder, tuple(given), in_cpp, **options)
    if live:
        _update(package.served, served, [*package.served.stats()])
    return package


def _storage(case: Case, folder: Path) -> td.SSDStore | None:
    """Return where rows of a frozen model lie: in memory, or in files with a small cache."""
    return td.SSDStore(folder, cache="16 rows") if case["served_from"] == "file" else None


def _copied(case: Case, model: nn.Module) -> nn.Module:
    if case["copied"] == "pickle":
        return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]
    if case["copied"] == "deepcopy":
        return copy.deepcopy(model)
    if case["copied"] == "state_dict":
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        for buffer in model.buffers():
            if buffer.dtype == torch.uint8:
                buffer.zero_()
        model.load_state_dict(torch.load(file, weights_only=True))
    return model


def _wrong_outputs(case: Case, served: Served, model: nn.Module | Package) -> list[str]:
    if case["converted"] and not isinstance(model, Package):
        model.to(TYPES[case["converted"]])
    found = []
    for number in range(2):
        batch = {name: _batch(case, 10 * number + n) for n, name in enumerate(served.names)}
        counted = Counted(model)
        result = served(counted, batch)
        if counted.missing not in (None, _missing(served, batch)):
            found.append(f"missing {counted.missing}, expected {_missing(served, batch)}")
        for name, rows in served.rows.items():
            value, off = rows.output(batch[name])
            got = result[name].detach().double().numpy()
            if got.shape != value.shape:
                found.append(f"{name}: shape {got.shape}, expected {value.shape}")
                continue
            tolerance = TOLERANCE[case["converted"] or case["output_dtype"]]
            if case["updated"] == "log" and case["log_rows"]:
                off = off + rows_off(case, rows, batch[name])
                tolerance = max(tolerance, TOLERANCE[case["dtype"]])  # rows are rounded again
            if not (np.abs(got - value) <= off + tolerance * (1 + np.abs(value))).all():
                found.append(
                    f"{name}: off by {np.abs(got - value).max():.3g}, allowed {off.max():.3g}"
                )
    return found


def rows_off(case: Case, rows: Rows, batch: Batch) -> Floats:
    """Return how far outputs may be off by the form of a log."""
    form = Rows({**case, "rows": case["log_rows"]}, rows.dim)
    form.of = rows.of
    return form.output(batch)[1]


class Counted:
    """A model that may also count missing ids, called as one that does not."""

    def __init__(self, model: nn.Module | Package) -> None:
        self.model, self.missing = model, None

    def __call__(self, *given: Any) -> Any:
        output = self.model(*given)
        if isinstance(self.model, serving.CountsMissing):
            output, missing = output
            self.missing = missing.tolist()
        elif isinstance(self.model, Package):
            self.missing = self.model.missing
        return output


def _missing(served: Served, batch: Mapping[str, Batch]) -> list[int]:
    padding = {PADDING} if served.case["padding_idx"] else set()
    return [
        sum(id not in {*served.rows[name].of, *padding} for bag in of.ids for id in bag)
        for name, of in batch.items()
    ]


def _update(served_by: Any, served: Served, names: Sequence[str]) -> None:
    """Write rows of ids, and remove others, in the tables that serve."""
    update = served_by.update if hasattr(served_by, "update") else served_by.apply
    for name, (_, rows) in zip(names, served.rows.items(), strict=True):
        for ids in ([*KNOWN[:2], *KNOWN[-4:-1]], [*KNOWN[-3:], *NEW]):  # together more than FEW
            of_ids = torch.randn(len(ids), rows.dim, generator=seeded(len(rows.of)))
            update(name, torch.tensor(ids), of_ids)
            rows.set(ids, of_ids, in_table=served.case["rows"] is None)
        served_by.erase(name, torch.tensor(KNOWN[:2]))
        for id in KNOWN[:2]:
            rows.of.pop(id, None)


def meant(case: Case) -> Case:
    """Return a case without the values that its other values ignore or refuse."""
    case = dict(case)
    for said, names in WITHOUT:
        if said(case):
            case |= {name: SPACE.axes[name][0] for name in names}
    return case


WITHOUT: list[tuple[Any, list[str]]] = [  # when -> axes that are plain then
    # ignored
    (lambda c: c["kind"] not in BAGS, ["mode", "weighted"]),
    (lambda c: c["kind"] not in ("bag", "bags", "sequences"), ["form"]),
    (lambda c: c["kind"] == "bags" and c["form"] == "padded", ["weighted"]),
    (
        lambda c: c["kind"] == "recis",
        ["eval_default", "padding_idx", "policy", "storage", "split", "output_dtype", "ids"],
    ),
    (lambda c: not c["weighted"], ["weights_learn"]),
    (lambda c: c["policy"] not in ("custom", "ttl"), ["keep"]),
    (lambda c: c["how"] == "freeze", ["updated"]),
    (lambda c: c["updated"] != "log", ["log_rows"]),
    # refused
    (lambda c: c["how"] != "freeze", ["copied"]),
    (lambda c: c["how"] in PACKAGES and c["updated"] == "log", ["updated", "log_rows"]),
    (lambda c: c["how"] in PACKAGES and c["updated"] == "update", ["converted"]),
    # this program has no updates, and a package is compiled for the sizes 2 and more
    (lambda c: c["how"] == "package_cpp", ["updated"]),
    (lambda c: c["how"] in PACKAGES, ["batch"]),
    (lambda c: c["storage"] == "ssd" and c["updated"] == "log", ["storage"]),
]

SPACE = Space(
    "serving",
    axes={
        "how": ["freeze", "live", *PACKAGES],
        "rows": [None, "fp16", "bf16", "int8", "int4", "fp8"],
        "kind": ["embedding", "bag", "bags", "sequences", "recis"],
        "dtype": list(TYPES),
        "dim": [4, 18, 64],
        "mode": ["sum", "mean"],
        "weighted": [False, True],
        "weights_learn": [False, True],
        "form": ["jagged", "padded"],
        "ids": ["int64", "int32"],
        "strided": [False, True],
        "batch": [5, 0, 1],
        "absent": ["some", "none", "all"],
        "padding_idx": [False, True],
        "eval_default": ["initial", "zeros", "tensor"],
        "policy": list(POLICIES),
        "storage": ["none", "ssd"],
        "served_from": ["memory", "file"],
        "names": [1, 2],
        "split": [False, True],
        "output_dtype": list(TYPES),
        "converted": [None, "fp16", "bf16"],
        "keep": [None, "top", "at_least"],
        "copied": ["no", "pickle", "deepcopy", "state_dict"],
        "updated": ["no", "update", "log"],
        "log_rows": [None, "int8", "fp16"],
    },
    constraints=[],
    check=check,
    public=[serving.freeze, serving.live, serving.LiveTables, delta_log.follow],
    without_axis={
        "model": "axis kind",
        "input": "axis form",
        "source": "axis kind",
        "missing": "each frozen model has one that counts beside it",
        "ranks": "needs ranks: torchrec_space.py, test_frozen_models.py",
        "headroom": "runs out: test_live_tables.py",
        "dense_version": "is a name: test_live_tables.py",
        "log": "axis updated",
        "base": "axis updated",
        "sequence": "begins at a commit: test_following_live.py",
        "dense": "keeps the dense state: test_following_live.py",
    },
)
