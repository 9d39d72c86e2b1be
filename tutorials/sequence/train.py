"""The steps, of one process or of many that do the same together."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from torch_dynemb.recis import SparseAdam, filter_out_sparse_param
from tutorials.dlrm.metrics import RunningAUC, exact_auc
from tutorials.sequence.data import Batch, ClickStream
from tutorials.sequence.model import SequenceModel
from tutorials.sequence.options import Options

HELD_OUT_STEPS = 30
_HALF_LIFE = 20  # steps, of the running AUC
_EPS = 1e-6  # of SparseAdam: small beside gradients of a mean over a batch, large beside rounding


class Point(NamedTuple):
    """A point of the plot: mean loss since the last one, and running AUC, both before updates."""

    step: int
    loss: float
    auc: float


class Trained(NamedTuple):
    """Results of a model after its training.

    Attributes:
        points: Of the training.
        auc: On the held-out samples; NaN on ranks other than 0.
        best_auc: The same of the planted probabilities.
        ids: By table, on all ranks together.
        seconds: Of training.
    """

    points: list[Point]
    auc: float
    best_auc: float
    ids: dict[str, int]
    seconds: float


def world_size() -> int:
    """Process that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def train(options: Options, name: str, *, history: bool) -> Trained:
    """Train a model, evaluate it on the samples that follow.

    Ranks call it together. Each takes its part of every batch; gradients of the network are
    averaged by DistributedDataParallel, those of rows by the engine.

    Args:
        options: Of the program, the same on all ranks.
        name: What the progress bar shows.
        history: Whether the model sees the histories.
    """
    torch.manual_seed(options.seed)
    model = SequenceModel(options.embedding_dim, history=history)
    # Rows are not parameters: the two optimizers know nothing of each other.
    row_optimizer = SparseAdam(filter_out_sparse_param(model), lr=options.lr, eps=_EPS)
    network_optimizer = torch.optim.Adam(model.network.parameters(), lr=options.dense_lr)
    if world_size() > 1:
        model.network = DistributedDataParallel(model.network)  # the tables are not part of it
    loss_of: nn.Module = _Loss(model)
    if options.compile:
        loss_of = torch.compile(loss_of, fullgraph=True, dynamic=True)

    stream = ClickStream(options.seed, options.batch_size)
    figures = _Figures(options.batch_size)
    points: list[Point] = []
    began = time.perf_counter()
    with tqdm(total=options.steps, desc=name, unit="step", disable=not _first()) as bar:
        for step in range(1, options.steps + 1):
            batch = _mine(stream.next_batch())
            row_optimizer.zero_grad()
            network_optimizer.zero_grad()
            loss, chances = loss_of(*batch[:6])
            loss.backward()  # the gradients of rows wait in the tables
            row_optimizer.step()
            network_optimizer.step()
            figures.add(loss.detach(), batch.labels, chances)
            if step % options.log_every == 0 or step == options.steps:
                points.append(figures.point(step))
                bar.set_postfix(loss=f"{points[-1].loss:.4f}", auc=f"{points[-1].auc:.4f}")
            bar.update()
    seconds = time.perf_counter() - began
    auc, best_auc = _evaluate(model, stream)
    return Trained(points, auc, best_auc, _ids(model), seconds)


class _Loss(nn.Module):
    """Module that is compiled: log-loss and, detached, the probabilities."""

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        users: Tensor,
        candidates: Tensor,
        history: Tensor,
        offsets: Tensor,
        recency: Tensor,
        labels: Tensor,
    ) -> tuple[Tensor, Tensor]:
        logits = self.model(users, candidates, history, offsets, recency)
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        return loss, logits.detach().sigmoid()


class _Figures:
    """Loss and AUC of all ranks' samples."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._auc = RunningAUC(_HALF_LIFE * batch_size)
        self._loss_sum = torch.zeros(1, dtype=torch.float64)
        self._steps = 0

    def add(self, loss: Tensor, labels: Tensor, chances: Tensor) -> None:
        """Count this rank's part of a batch."""
        self._loss_sum += loss
        self._steps += 1
        self._auc.update(labels, chances, passed=self._batch_size)

    def point(self, step: int) -> Point:
        """Return the figures of all ranks, which call this together, and count losses anew."""
        sums = torch.cat([self._loss_sum, self._auc.counts.flatten()])
        if world_size() > 1:
            dist.all_reduce(sums)
        everyones = RunningAUC(self._auc.half_life)
        everyones.counts = sums[1:].view_as(self._auc.counts)
        loss = float(sums[0]) / (self._steps * world_size())
        self._loss_sum.zero_()
        self._steps = 0
        return Point(step, loss, everyones.compute())


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _mine(batch: Batch) -> Batch:
    if world_size() == 1:
        return batch
    return batch.part(dist.get_rank(), world_size())


@torch.no_grad()
def _evaluate(model: SequenceModel, stream: ClickStream) -> tuple[float, float]:
    """Return AUC of the model and of the planted probabilities; unknown ids read zeros."""
    model.eval()
    parts = []
    for _ in range(HELD_OUT_STEPS):
        batch = _mine(stream.next_batch())
        parts.append(torch.stack([batch.labels, model(*batch[:5]), batch.chances]))
    mine = torch.cat(parts, 1)
    everyones = [torch.empty_like(mine) for _ in range(world_size())] if _first() else None
    if world_size() > 1:
        dist.gather(mine, everyones)
    else:
        everyones = [mine]
    if everyones is None:
        return float("nan"), float("nan")
    labels, scores, chances = torch.cat(everyones, 1)
    return exact_auc(labels, scores), exact_auc(labels, chances)


def _ids(model: SequenceModel) -> dict[str, int]:
    ids = model.ids()
    counts = torch.tensor(list(ids.values()))
    if world_size() > 1:
        dist.all_reduce(counts)
    return dict(zip(ids, counts.tolist(), strict=True))
