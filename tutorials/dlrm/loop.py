"""One pass over the training samples, and the AUC on the samples that follow them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from tutorials.dlrm.data import Batch, CriteoReader, Position
from tutorials.dlrm.job.progress import peak_memory, resident_memory, shown
from tutorials.dlrm.metrics import RunningAUC, exact_auc
from tutorials.dlrm.model import DLRM, Figures, dense_features

HALF_LIFE = 100_000
"""Samples, of the running AUC."""


class Point(NamedTuple):
    """A point of the curves in the report; the last three are of dynamic tables only."""

    samples: int  # trained on so far
    loss: float  # mean since the point before
    auc: float  # running
    seconds: float  # of training
    resident_bytes: int  # of this process
    table_bytes: int = 0
    ids: tuple[int, ...] = ()  # in the tables, by feature
    evicted: tuple[int, ...] = ()  # so far, by feature


class Pass:
    """The training of a model: its steps, and the state that they change beside its tensors.

    Args:
        model: On the device.
        optimizers: Those of tables among them have updated rows in the backward already.
        device: Of the batches, too.
        log_every: Steps between points.
        accumulate: Micro-batches of a step, over which gradients are added up.
        figures: Gives the numbers of dynamic tables; None: there are none.
        prefetch: Takes the ids (26, B) of the next step while a step goes on; None: batches are
            read only when they are trained on.
        compiled: Compile the forward, with dynamic shapes.
    """

    def __init__(
        self,
        model: DLRM,
        optimizers: list[torch.optim.Optimizer],
        *,
        device: str | torch.device = "cpu",
        log_every: int,
        accumulate: int = 1,
        figures: Callable[[], Figures] | None = None,
        prefetch: Callable[[Tensor], None] | None = None,
        compiled: bool = False,
    ) -> None:
        self.model, self.optimizers = model, optimizers
        self.log_every, self.accumulate = log_every, accumulate
        self.figures, self.prefetch = figures, prefetch
        self.device = torch.device(device)
        self.step = self.samples = 0
        self.seconds = 0.0
        """Spent in :meth:`train`, those of resumed runs included."""
        self._seconds_before = 0.0
        self.peak_bytes = 0
        """The most memory of the process until the end of :meth:`train`."""
        self.points: list[Point] = []
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
        after_step: Callable[[Position], None] = lambda _: None,
    ) -> None:
        """Train on every sample of a reader.

        Args:
            reader: Yields the batches.
            bar: Advances by the samples.
            after_step: Called after every step with the position behind its samples.
        """
        self.model.train()
        self._seconds_before = self.seconds
        began = time.perf_counter() - self.seconds
        for batch, following, position in _steps(reader, ahead=self.prefetch is not None):
            self._train_batch(batch, following)
            bar.update(batch.whole)
            self.seconds = time.perf_counter() - began
            if self.step % self.log_every == 0:
                self._add_point(bar, position)
            self.seconds = time.perf_counter() - began
            after_step(position)
        if self.step and (not self.points or self.points[-1].samples < self.samples):
            self._add_point(bar, reader.position)
        self.peak_bytes = peak_memory()

    def seconds_of_run(self) -> float:
        """Return the seconds of training of this run alone."""
        return max(self.seconds - self._seconds_before, 1e-9)

    def _train_batch(self, batch: Batch, following: Batch | None) -> None:
        dense, ids, labels = tensors(batch, self.device)
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
            (loss * (len(chances) / count)).backward()
            self._loss_sum += loss.detach().double().cpu() * len(chances)
            probabilities.append(chances)
        for optimizer in self.optimizers:
            optimizer.step()
        self.auc.update(labels.cpu(), torch.cat(probabilities).cpu())
        self._count(count)

    def _prefetch(self, following: Batch | None) -> None:
        if self.prefetch is not None and following is not None:
            self.prefetch(torch.from_numpy(following.ids).to(self.device))

    def _count(self, samples: int) -> None:
        self.step += 1
        self.samples += samples
        self._loss_samples += samples

    def evaluate(self, reader: CriteoReader, bar: tqdm[Any] | None = None) -> float:
        """Return the AUC on every sample of a reader, changing nothing; NaN if there are none."""
        labels, scores = self._predict(reader, bar)
        return exact_auc(labels.numpy(), scores.numpy())

    @torch.no_grad()
    def _predict(self, reader: CriteoReader, bar: tqdm[Any] | None) -> tuple[Tensor, Tensor]:
        self.model.eval()
        labels, scores = [torch.empty(0)], [torch.empty(0)]
        for batch in reader:
            dense, ids, _ = tensors(batch, self.device)
            labels.append(torch.from_numpy(batch.labels))
            scores.append(self.model(dense, ids).cpu())
            if bar is not None:
                bar.update(batch.whole)
        return torch.cat(labels), torch.cat(scores)

    def state_dict(self) -> dict[str, Any]:
        """Return counters and running figures."""
        return {
            "step": self.step,
            "samples": self.samples,
            "seconds": self.seconds,
            "points": [tuple(point) for point in self.points],
            "auc": self.auc.counts,
            "loss_sum": self._loss_sum,
            "loss_samples": self._loss_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`."""
        self.step, self.samples, self.seconds = state["step"], state["samples"], state["seconds"]
        self.points = [Point(*values) for values in state["points"]]
        self.auc.counts = state["auc"]
        self._loss_sum, self._loss_samples = state["loss_sum"], state["loss_samples"]

    def _add_point(self, bar: tqdm[Any], position: Position) -> None:
        loss, auc = self._loss_and_auc()
        figures = None if self.figures is None else self.figures()
        point = Point(self.samples, loss, auc, self.seconds, resident_memory())
        if figures is not None:
            point = point._replace(
                table_bytes=figures.table_bytes,
                ids=figures.ids_by_feature,
                evicted=figures.evicted_by_feature,
            )
        self.points.append(point)
        self._loss_sum.zero_()
        self._loss_samples = 0
        more = {} if figures is None else shown(figures, position, self.seconds_of_run())
        bar.set_postfix({"loss": f"{loss:.4f}", "auc": f"{auc:.4f}"} | more, refresh=False)

    def _loss_and_auc(self) -> tuple[float, float]:
        """Return the mean loss since the last point, and the running AUC."""
        return float(self._loss_sum) / self._loss_samples, self.auc.compute()


class Loss(nn.Module):
    """The part that is compiled: the log-loss of a batch and, detached, its probabilities."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(dense, ids)
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        return loss, logits.detach().sigmoid()


def tensors(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of the model: dense (B, 26), ids (26, B), labels (B,)."""
    return (
        dense_features(batch.integers).to(device),
        torch.from_numpy(batch.ids).to(device),
        torch.from_numpy(batch.labels).to(device),
    )


def _steps(reader: CriteoReader, *, ahead: bool) -> Iterator[tuple[Batch, Batch | None, Position]]:
    """Yield every batch, the one that follows it if that is read ahead, and its position."""
    batches = iter(reader)
    batch = next(batches, None)
    while batch is not None:
        position = reader.position
        following = next(batches, None) if ahead else None
        yield batch, following, position
        batch = following if ahead else next(batches, None)
