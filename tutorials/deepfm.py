"""DeepFM with the idioms of a training script: ``python -m tutorials.deepfm``.

Guo et al. 2017, https://arxiv.org/abs/1703.04247, on generated clicks: autocast, GradScaler, rates
by schedule, one norm of all gradients, torch.compile, weight decay, early stopping, checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.classification import BinaryAUROC
from tqdm import tqdm

import torch_dynemb as td
from tutorials.dlrm.data import CATEGORY_COUNT, CriteoReader
from tutorials.dlrm.job.generate import PlantedConfig, generate
from tutorials.dlrm.model import DENSE_COUNT, dense_features

DIM, BATCH, PATIENCE, LR, ROW_LR, DECAY = 16, 1024, 1, 0.003, 0.01, 1e-4


class DeepFM(nn.Module):
    """A factorization machine, and an MLP over the same rows; column 0 of a row is its weight."""

    def __init__(self) -> None:
        super().__init__()
        adam = td.Adam(lr=ROW_LR, weight_decay=DECAY, decoupled_weight_decay=True)
        self.rows = td.DynamicEmbedding(1 + DIM, name="rows", optimizer=adam, split=True)
        layers = [nn.Linear(CATEGORY_COUNT * DIM + DENSE_COUNT, 256), nn.ReLU()]
        self.deep = nn.Sequential(*layers, nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Return log-odds [B] from numbers [B, DENSE_COUNT] and ids [B, CATEGORY_COUNT]."""
        weights, factors = self.rows(ids).split([1, DIM], dim=2)
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        deep: Tensor = self.deep(torch.cat([factors.flatten(1), dense], dim=1))
        return weights.sum((1, 2)) + pairs + deep.squeeze(1)


def clicks(samples: int) -> TensorDataset:
    """Return numbers, ids and labels in the order of time."""
    path = generate(PlantedConfig(samples=samples), Path("runs/data")).path
    batch = next(iter(CriteoReader([path], samples)))
    fields = torch.arange(CATEGORY_COUNT)[:, None] << 56  # which share a table
    ids = (torch.from_numpy(batch.ids) ^ fields).t().contiguous()
    return TensorDataset(dense_features(batch.integers), ids, torch.from_numpy(batch.labels))


@torch.no_grad()
def auc_of(model: DeepFM, batches: DataLoader[Any]) -> float:
    auc = BinaryAUROC()
    model.eval()
    for dense, ids, labels in batches:
        auc.update(model(dense, ids), labels.long())
    model.train()
    return float(auc.compute())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=5, help="at most")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--resume", action="store_true", help="go on after the last whole epoch")
    parser.add_argument("--out", type=Path, default=Path("runs/deepfm"), metavar="FOLDER")
    chosen = parser.parse_args(arguments)

    torch.manual_seed(0)
    data, count = clicks(chosen.samples), chosen.samples * 9 // 10
    batches = DataLoader(Subset(data, range(count)), BATCH, shuffle=True, drop_last=True)
    held_out = DataLoader(Subset(data, range(count, chosen.samples)), BATCH)
    model = DeepFM()
    forward = model if chosen.eager else torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    td.step_with(optimizer, model)
    steps, rows = chosen.epochs * len(batches), model.rows.optimizer
    schedules = [OneCycleLR(optimizer, LR, steps), OneCycleLR(rows, ROW_LR, steps)]  # one each
    scaler = torch.amp.GradScaler("cpu")
    parts = [optimizer, rows, scaler, *schedules]
    state: dict[str, Any] = {"epoch": -1, "best": (0.0, 0)}
    if chosen.resume:
        state = td.checkpoint.load(chosen.out / "last", model, progress=False).state
        for part, saved in zip(parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        torch.set_rng_state(state["random"])
    best = state["best"]
    for epoch in range(state["epoch"] + 1, chosen.epochs):
        for dense, ids, labels in tqdm(batches, desc=f"epoch {epoch}"):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                logits = forward(dense, ids)
            scaler.scale(binary_cross_entropy_with_logits(logits, labels)).backward()
            scaler.unscale_(optimizer)
            td.clip_grad_norm_(model, max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
            for schedule in schedules:
                schedule.step()
        auc = auc_of(model, held_out)
        print(f"epoch {epoch}: AUC {auc:.4f}, {len(model.rows):,} ids")
        if auc > best[0]:
            best = (auc, epoch)
            td.checkpoint.save(chosen.out / "best", model, progress=False)
        state = {"epoch": epoch, "best": best, "random": torch.get_rng_state()}
        state["parts"] = [part.state_dict() for part in parts]
        td.checkpoint.save(chosen.out / "last", model, state=state, progress=False)
        if epoch - best[1] >= PATIENCE:
            break
    td.checkpoint.load(chosen.out / "best", model, progress=False)
    print(f"best: epoch {best[1]}, AUC {auc_of(model, held_out):.4f}")


if __name__ == "__main__":
    main()
