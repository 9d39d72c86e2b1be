"""One pass over the training samples, and the AUC on the ones that follow them."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from tutorials.dlrm.criteo import Batch, CriteoReader, Position
from tutorials.dlrm.metrics import RunningAUC, exact_auc
from tutorials.dlrm.model import DLRM, dense_features
from tutorials.dlrm.rows import Figures

HALF_LIFE = 100_000
"""Samples, of the running AUC."""


class Point(NamedTuple):
    """What is known about training at some step, for the plot."""

    samples: int  # trained on so far
    loss: float  # mean since the point before
    auc: float  # running


class Moment(NamedTuple):
    """What is known about tables and process at some step, for the report."""

    samples: int  # trained on so far
    seconds: float  # of training
    table_bytes: int  # of memory
    resident_bytes: int  # of this process
    ids: tuple[int, ...]  # in the tables, by feature
    evicted: tuple[int, ...]  # ids that had to go so far, by feature


class Pass:
    """Training state of a model apart from its tensors, and the steps that change it.

    The first step of a pass is the first sample of the reader it is given: a pass whose state was
    loaded goes on with a reader that starts at the recorded position.

    Args:
        model: On its device.
        optimizers: One of them may be a table's, which moved the rows in the backward already.
        log_every: Steps between points.
        accumulate: Micro-batches whose gradients are added up in a step.
        prefetch: Is told the ids (26, B) of the next step when those of a step have been looked up;
            None: nobody is, and a batch is read only when it is trained on.
        compiled: Whether to compile the forward, shapes dynamic from the first batch on.
    """

    def __init__(
        self,
        model: DLRM,
        optimizers: list[torch.optim.Optimizer],
        *,
        log_every: int,
        accumulate: int = 1,
        prefetch: Callable[[Tensor], None] | None = None,
        compiled: bool = False,
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.log_every = log_every
        self.accumulate = accumulate
        self.prefetch = prefetch
        self.step = 0
        self.samples = 0
        self.seconds = 0.0
        """Time spent in :meth:`train`, reading and what is done after steps included."""
        self.seconds_before = 0.0
        """Of them, those of the runs that this one has resumed."""
        self.peak_bytes = 0
        """The most memory that the process has had by the end of :meth:`train`."""
        self.points: list[Point] = []
        self.moments: list[Moment] = []
        self.auc = RunningAUC(HALF_LIFE)
        self._loss_sum = torch.zeros((), dtype=torch.float64)
        self._loss_samples = 0
        self._forward: Callable[..., tuple[Tensor, Tensor]] = Loss(model)
        if compiled:
            self._forward = torch.compile(self._forward, fullgraph=True, dynamic=True)

    def train(
        self,
        reader: CriteoReader,
        bar: tqdm[Any],
        *,
        describe: Callable[[], dict[str, str]],
        after_step: Callable[[Position], None],
    ) -> None:
        """Train on every sample of a reader.

        Args:
            reader: Yields the batches.
            bar: Advances by the samples.
            describe: More to show in the bar, at every point.
            after_step: Called after every step with the position behind its samples.
        """
        self.model.train()
        self.seconds_before = self.seconds
        began = time.perf_counter() - self.seconds
        for batch, following, position in _steps(reader, ahead=self.prefetch is not None):
            self._train_batch(batch, following)
            bar.update(batch.whole)
            self.seconds = time.perf_counter() - began
            if self.step % self.log_every == 0:
                self._add_point(bar, describe)
            self.seconds = time.perf_counter() - began
            after_step(position)
        self.peak_bytes = peak_memory()
        if not self.points and self.step:  # fewer steps than log_every: the only point
            self._add_point(bar, describe)

    def remember(self, figures: Figures) -> None:
        """Keep what is known about tables and process at this step, unless that has been done."""
        if self.moments and self.moments[-1].samples == self.samples:
            return
        self.moments.append(
            Moment(
                self.samples,
                self.seconds,
                figures.table_bytes,
                resident_memory(),
                figures.ids_by_feature,
                figures.evicted_by_feature,
            )
        )

    def evaluate(self, reader: CriteoReader, bar: tqdm[Any] | None = None) -> float:
        """Return the AUC on every sample of a reader, changing nothing; NaN if there are none.

        Args:
            reader: Yields the batches.
            bar: Advances by the samples.
        """
        labels, scores = self._predict(reader, bar)
        return exact_auc(labels.numpy(), scores.numpy())

    def _predict(self, reader: CriteoReader, bar: tqdm[Any] | None) -> tuple[Tensor, Tensor]:
        """Labels and scores, higher for more likely clicks, of every sample of a reader."""
        self.model.eval()
        labels, scores = [torch.empty(0)], [torch.empty(0)]
        with torch.no_grad():
            for batch in reader:
                labels.append(torch.from_numpy(batch.labels))
                dense, ids, _ = tensors(batch, self._device())
                scores.append(self.model(dense, ids).cpu())
                if bar is not None:
                    bar.update(batch.whole)
        return torch.cat(labels), torch.cat(scores)

    def state_dict(self) -> dict[str, Any]:
        """Return counters and running figures; not the time, which no two runs share."""
        return {
            "step": self.step,
            "samples": self.samples,
            "points": [tuple(point) for point in self.points],
            "auc": self.auc.counts,
            "loss_sum": self._loss_sum,
            "loss_samples": self._loss_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.step = state["step"]
        self.samples = state["samples"]
        self.points = [Point(*values) for values in state["points"]]
        self.auc.counts = state["auc"]
        self._loss_sum = state["loss_sum"]
        self._loss_samples = state["loss_samples"]

    def _device(self) -> torch.device:
        return self.model.pairs.device

    def _train_batch(self, batch: Batch, following: Batch | None) -> None:
        dense, ids, labels = tensors(batch, self._device())
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        count = len(batch.labels)
        part = -(-count // self.accumulate)  # samples of a micro-batch
        probabilities = []
        for begin in range(0, count, part):
            here = slice(begin, begin + part)
            loss, chances = self._forward(dense[here], ids[:, here], labels[here])
            if begin + part >= count:  # the disk works for the next step during this backward
                self._prefetch(following)
            share = len(chances) / count
            (loss * share).backward()
            self._loss_sum += loss.detach().double().cpu() * len(chances)
            probabilities.append(chances)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self.samples += count
        self._loss_samples += count
        self.auc.update(labels.cpu(), torch.cat(probabilities).cpu())

    def _prefetch(self, following: Batch | None) -> None:
        if self.prefetch is not None and following is not None:
            self.prefetch(torch.from_numpy(following.ids).to(self._device()))

    def _add_point(self, bar: tqdm[Any], describe: Callable[[], dict[str, str]]) -> None:
        loss, auc = self._loss_and_auc()
        self.points.append(Point(self.samples, loss, auc))
        self._loss_sum.zero_()
        self._loss_samples = 0
        bar.set_postfix({"loss": f"{loss:.4f}", "auc": f"{auc:.4f}"} | describe(), refresh=False)

    def _loss_and_auc(self) -> tuple[float, float]:
        """Mean loss since the last point, running AUC."""
        return float(self._loss_sum) / self._loss_samples, self.auc.compute()


class Loss(nn.Module):
    """What is compiled: the log-loss of a batch and, detached, its probabilities."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(dense, ids)
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        return loss, logits.detach().sigmoid()


def _steps(reader: CriteoReader, *, ahead: bool) -> Iterator[tuple[Batch, Batch | None, Position]]:
    """Yield every batch, the one that follows it if that is to be read ahead, and its position."""
    batches = iter(reader)
    batch = next(batches, None)
    while batch is not None:
        position = reader.position
        following = next(batches, None) if ahead else None
        yield batch, following, position
        batch = following if ahead else next(batches, None)


def peak_memory() -> int:
    """Return the most bytes this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def resident_memory() -> int:
    """Return the bytes this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def tensors(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the model wants of a batch: dense (B, 26), ids (26, B), labels (B,)."""
    return (
        dense_features(batch.integers).to(device),
        torch.from_numpy(batch.ids).to(device),
        torch.from_numpy(batch.labels).to(device),
    )
