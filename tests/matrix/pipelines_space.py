"""TorchRec's pipelines around sharded models with dynamic tables, against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torchrec_space as plain
from covering import Case, Space, folder_of_ranks
from cpu_streams import streams_of_cpu
from numpy_bags import (
    BY_ROWS,
    OPTIMIZERS,
    POLICIES,
    SAMPLES,
    TOLERANCE,
    Bags,
    Floats,
    Rows,
    bags_of,
    batch_of,
    tables_of,
)
from sharded_models import BAG_SHARDINGS, SEQUENCE_SHARDINGS, Model, Table
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec_space import difference, loaded, model_of, names_of, wrong_rows

from torch_dynemb.torchrec import PrefetchTrainPipeline

CPU = torch.device("cpu")
PIPELINES: dict[str, Callable[..., Any]] = {
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipeline,
    "semi_sync": TrainPipelineSemiSync,
}
AHEAD = ("sparse_dist", "prefetch", "semi_sync")  # they send ids of later batches
FREE_EARLY = ("sparse_dist", "prefetch")
EPOCHS = 2


class _Loss(nn.Module):
    """The loss of which the gradient of an output is a tenth of the output, plus 1."""

    def forward(self, outputs: list[Tensor]) -> Tensor:
        losses = [(of.float().square() / 20 + of.float()).sum() for of in outputs]
        return torch.stack(losses).sum()


class Piped(Model):
    """A model that torch.fx can trace, as pipelines do: with the loss, and outputs by name."""

    def __init__(self, tables: Sequence[Table], weighted: bool) -> None:
        super().__init__(tables, weighted)
        self.loss = _Loss()
        self.names = [(name, table.pooling == "none") for name, table, _ in names_of(tables)]

    def forward(  # type: ignore[override]
        self, features: KeyedJaggedTensor
    ) -> tuple[Tensor, list[Tensor]]:
        pooled = self.bags(features) if hasattr(self, "bags") else {}
        rows = self.sequences(features) if hasattr(self, "sequences") else {}
        outputs = [
            rows[name].values() if unpooled else pooled[name] for name, unpooled in self.names
        ]
        return self.loss(outputs), outputs


class _Expected:
    """What numpy trains."""

    def __init__(self, case: Case, tables: Sequence[Table], rows: Mapping[str, Rows]) -> None:
        self._rows = rows
        self._names = [of for of in names_of(tables) if of[1].dynamic]
        self._delayed = case["pipeline"] == "semi_sync"

    def epoch(self, batches: Sequence[Sequence[Mapping[str, Bags]]]) -> list[list[list[Floats]]]:
        """Train on batches; return the outputs of each, of each rank."""
        outputs: list[list[list[Floats]]] = []
        for number, batch in enumerate(batches):
            outputs.append([self.outputs(of, reads=False) for of in batch])
            if not self._delayed:
                self._step(batch, outputs[-1])
            elif number > 0:  # the batch before it, which was looked up then
                self._step(batches[number - 1], outputs[-2])
        if self._delayed and batches:
            self._step(batches[-1], outputs[-1])
        return outputs

    def outputs(self, of: Mapping[str, Bags], *, reads: bool) -> list[Floats]:
        """Return the outputs of a rank's batch."""
        return [
            self._rows[table.name].output(of[feature], reads=reads)
            for _, table, feature in self._names
        ]

    def _step(
        self, batch: Sequence[Mapping[str, Bags]], outputs: Sequence[Sequence[Floats]]
    ) -> None:
        for of, of_rank in zip(batch, outputs, strict=True):
            for (_, table, feature), output in zip(self._names, of_rank, strict=True):
                self._rows[table.name].add_gradient(of[feature], output / 10 + 1)
        for rows in self._rows.values():
            rows.step(len(batch))


def _tables(case: Case) -> list[Table]:
    """Return the tables of torchrec_space, or t and one of the other kind."""
    if case["beside"] != "both_kinds":
        return tables_of(case)
    (t,) = tables_of({**case, "beside": "one"})
    pooling = "sum" if t.pooling == "none" else "none"
    sharding = t.sharding if t.sharding in SEQUENCE_SHARDINGS else "row_wise"
    return [replace(t, name="u", features=("c",), pooling=pooling, sharding=sharding), t]


def _pipeline(case: Case, model: Any) -> Any:
    more: dict[str, Any] = {}
    if case["pipeline"] != "base":
        more["execute_all_batches"] = True
    if case["pipeline"] == "semi_sync":
        more["start_batch"] = 0
    if case["free_features"]:
        more["free_features_storage_early"] = True
    if case["enqueues_late"]:
        more["enqueue_batch_after_forward"] = True
    return PIPELINES[case["pipeline"]](model, model.fused_optimizer, CPU, **more)


def _drained(progress: Callable[[Any], Any], batches: Iterator[Any]) -> Iterator[list[Tensor]]:
    while True:
        try:
            yield [of.detach().clone() for of in progress(batches)]
        except StopIteration:
            return


def check(rank: int, case: Case) -> list[str]:
    """Return where outputs or rows differ from those of numpy; collective."""
    case = {**PLAIN, **case, "delayed_gradients": "apply" if _delays(case) else None}
    if case["storage"] == "ssd":
        case["loaded_by"] = "insertion"
    streams = streams_of_cpu() if _delays(case) else nullcontext()
    with folder_of_ranks() as folder, streams:
        return _differences(rank, case, folder)


def _delays(case: Case) -> bool:
    return bool(case["pipeline"] == "semi_sync")


def _differences(rank: int, case: Case, folder: str) -> list[str]:
    tables = _tables(case)
    model = model_of(case, tables, folder, Piped)
    rows = loaded(case, model, tables)
    expected = _Expected(case, tables, rows)
    features = list(dict.fromkeys(sorted(feature for _, _, feature in names_of(tables))))
    dynamic = [table.dynamic for _, table, _ in names_of(tables)]
    tolerance = 4 * TOLERANCE[case["data_type"]]  # the gradient depends on rows that were rounded
    pipeline = _pipeline(case, model)
    last = {"whole": SAMPLES, "smaller": SAMPLES // 2, "empty": 0}[case["last"]]
    found: list[str] = []

    def drawn(epoch: int) -> list[list[dict[str, Bags]]]:
        count = case["batches"]
        return [
            [
                {
                    name: bags_of(case, of, 10 * epoch + n, f, last if n == count - 1 else SAMPLES)
                    for f, name in enumerate(features)
                }
                for of in range(dist.get_world_size())
            ]
            for n in range(count)
        ]

    def compare(what: str, given: Sequence[list[Tensor]], outputs: Sequence[list[Floats]]) -> None:
        if len(given) != len(outputs):
            found.append(f"{what}: {len(given)} batches, expected {len(outputs)}")
        for n, (of, of_batch) in enumerate(zip(given, outputs, strict=False)):
            chosen = [output for output, is_dynamic in zip(of, dynamic, strict=True) if is_dynamic]
            for got, wanted in zip(chosen, of_batch, strict=True):
                found.extend(difference(f"{what}, batch {n}", got, wanted, tolerance))

    for epoch in range(EPOCHS):
        batches = drawn(epoch)
        mine = iter([batch_of(case, of[rank]) for of in batches])
        given = list(_drained(pipeline.progress, mine))
        outputs = expected.epoch(batches)
        compare(f"epoch {epoch}", given, [of[rank] for of in outputs])
        if case["pipeline"] == "base":
            pipeline.reset()  # it would go on to say that its batches have ended
        if case["between"] == "nothing" or epoch > 0:
            continue
        unseen = drawn(5)
        model.eval()
        read = [batch_of(case, of[rank]) for of in unseen]
        if case["between"] == "evaluation":
            with torch.no_grad():
                given = list(_drained(pipeline.progress, iter(read)))
            if case["pipeline"] == "base":
                pipeline.reset()
        else:
            if case["pipeline"] != "base":
                pipeline.detach()
            with torch.no_grad():
                given = [model(of)[1] for of in read]
            if case["pipeline"] != "base":
                pipeline.attach(model)
        compare("evaluation", given, [expected.outputs(of[rank], reads=True) for of in unseen])
        model.train()
    if case["pipeline"] in AHEAD:
        pipeline.detach()
    return found + wrong_rows(model, rows, tolerance)


PLAIN = {**plain.SPACE.plain(), "dim": 16}  # what other spaces change
SPACE = Space(
    "pipelines",
    axes={
        "ranks": [1, 2],
        "pipeline": list(PIPELINES),
        "sharding": BAG_SHARDINGS,
        "pooling": ["sum", "mean", "none"],
        "weighted": [False, True],
        "use_index_dedup": [False, True],
        "vbe": [False, True],
        "padding_idx": [False, True],
        "beside": ["one", "two", "shared", "static", "both_kinds"],
        "data_type": ["FP32", "FP16", "BF16"],
        "optimizer": list(OPTIMIZERS),
        "policy": list(POLICIES),
        "split": [False, True],
        "storage": ["none", "ssd"],
        "batches": [5, 2, 1],
        "last": ["whole", "smaller", "empty"],
        "between": ["nothing", "evaluation", "detached"],
        "free_features": [False, True],
        "enqueues_late": [False, True],
    },
    constraints=[
        # as in torchrec_space
        lambda use_index_dedup, sharding: (
            not use_index_dedup or sharding in ("row_wise", "table_wise")
        ),
        lambda pooling, sharding: pooling != "none" or sharding in SEQUENCE_SHARDINGS,
        lambda pooling, weighted, beside: (
            not weighted or (pooling != "none" and beside != "both_kinds")
        ),
        lambda sharding, optimizer: optimizer != "row_wise_adagrad" or sharding in BY_ROWS,
        # TorchRec's own tables lack it
        lambda beside, pooling, weighted: beside != "static" or pooling != "sum" or not weighted,
        lambda beside, vbe: beside != "static" or not vbe,
        lambda beside, data_type: beside != "static" or data_type != "BF16",
        # refused: rows stay in memory until the step ends, which looked them up
        lambda pipeline, storage: pipeline != "semi_sync" or storage == "none",
        # options of some pipelines
        lambda pipeline, free_features: not free_features or pipeline in FREE_EARLY,
        lambda pipeline, enqueues_late: not enqueues_late or pipeline == "sparse_dist",
    ],
    check=check,
)
