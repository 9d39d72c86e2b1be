"""The pass of one process, done by several: each trains on its part of every batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from tutorials.dlrm.criteo import Batch, CriteoReader
from tutorials.dlrm.loop import HALF_LIFE, Pass, tensors
from tutorials.dlrm.metrics import RunningAUC, exact_auc


class RankPass(Pass):
    """What a rank does: the steps, figures and AUC are those of one process with all samples.

    Args:
        model: A DLRM in TorchRec's DistributedModelParallel.
        optimizers: As in :class:`Pass`.
        device: Of this rank.
        log_every: As in :class:`Pass`.
    """

    def __init__(
        self,
        model: Any,
        optimizers: list[torch.optim.Optimizer],
        *,
        device: torch.device,
        log_every: int,
    ) -> None:
        super().__init__(model, optimizers, log_every=log_every)
        self._on = device

    def evaluate(self, reader: CriteoReader, bar: tqdm[Any] | None = None) -> float:
        """Return the AUC on every sample of all ranks' readers; NaN on ranks other than 0."""
        mine = self._predict(reader, bar)
        first = dist.get_rank() == 0
        everyones: list[Any] | None = [None] * dist.get_world_size() if first else None
        dist.gather_object(mine, everyones)
        if everyones is None:
            return float("nan")
        labels, scores = zip(*everyones, strict=True)
        return exact_auc(torch.cat(labels).numpy(), torch.cat(scores).numpy())

    def _device(self) -> torch.device:
        return self._on

    def _train_batch(self, batch: Batch, following: Batch | None) -> None:
        """Train on this rank's part of a batch, which has no samples if the batch has too few."""
        count = batch.whole
        dense, ids, labels = tensors(batch, self._on)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        logits = self.model(dense, ids)
        self._prefetch(following)
        loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        # Ranks' gradients are averaged, so this makes them those of the whole batch's mean loss.
        (loss * (dist.get_world_size() / count)).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self.samples += count
        self._loss_sum += loss.detach().double().cpu()
        self._loss_samples += count
        chances = logits.detach().sigmoid()
        self.auc.update(labels.cpu(), chances.cpu(), passed=count)

    def state_dict(self) -> dict[str, Any]:
        """Return the figures of all ranks, which must call this together."""
        loss_sum, counts = self._sums()
        return super().state_dict() | {"auc": counts, "loss_sum": loss_sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over figures of all ranks: rank 0 goes on with them, the others begin with zeros."""
        super().load_state_dict(state)
        if dist.get_rank() > 0:
            self.auc.counts = torch.zeros_like(self.auc.counts)
            self._loss_sum = torch.zeros_like(self._loss_sum)

    def _loss_and_auc(self) -> tuple[float, float]:
        loss_sum, counts = self._sums()
        everyones = RunningAUC(HALF_LIFE)
        everyones.counts = counts
        return float(loss_sum) / self._loss_samples, everyones.compute()

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Sum of losses since the last point, and counts of the running AUC, of all ranks."""
        sums = torch.cat([self._loss_sum.reshape(1), self.auc.counts.flatten()]).to(self._on)
        dist.all_reduce(sums)
        sums = sums.cpu()
        return sums[0], sums[1:].view_as(self.auc.counts)
