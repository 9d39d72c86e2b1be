"""A small model in Lightning, transformers and accelerate, by a name on the command line.

``build/programs/bin/python tests/programs/frameworks_run.py trainer`` prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_dynemb as td

IDS = torch.randint(0, 500, (512, 3), generator=torch.Generator().manual_seed(3))
LABELS = (IDS % 2).sum(1, keepdim=True).gt(1).float()
BATCH = 32


class Clicks(nn.Module):
    """Ids of a row of a batch -> logit; ``forward`` with labels returns loss and logits."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ids = td.DynamicEmbeddingBag(
            8,
            mode="sum",
            name="ids",
            optimizer=td.Adam(lr=0.05),
            initializer=td.Normal(0, 0.1),
            process_group=group,
        )
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits = self.head(self.ids(ids))
        target = torch.zeros_like(logits) if labels is None else labels
        return nn.functional.binary_cross_entropy_with_logits(logits, target), logits


def loss_of(model: Clicks) -> float:
    """Loss on all samples."""
    model.eval()
    with torch.no_grad():
        return float(model(IDS, LABELS)[0])


def samples() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(IDS, LABELS)


def lightning(ddp: bool, saves: bool = False) -> dict[str, float | str]:
    """Lightning's loop: one process, or ddp of two that share the rows."""
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            if not ddp:
                self.clicks = Clicks()

        def configure_model(self) -> None:
            if not hasattr(self, "clicks"):
                self.clicks = Clicks(dist.group.WORLD)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.clicks(*batch)[0]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            td.step_with(optimizer, self)
            return optimizer

    module = Module()
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=2 if ddp else 1,
        strategy="ddp" if ddp else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(samples(), batch_size=BATCH))
    if saves:
        try:
            trainer.save_checkpoint("last")
        except RuntimeError as error:
            return {"error": str(error)}
    return {"loss": loss_of(module.clicks), "ids": len(module.clicks.ids)}


def trainer() -> dict[str, float]:
    """Trainer of transformers, with an optimizer of ours."""
    from transformers import Trainer, TrainingArguments

    class Records(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(IDS)

        def __getitem__(self, at: int) -> dict[str, Tensor]:
            return {"ids": IDS[at], "labels": LABELS[at]}

    clicks = Clicks()
    optimizer = torch.optim.Adam(clicks.parameters(), lr=0.01)
    td.step_with(optimizer, clicks)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=4,
            per_device_train_batch_size=BATCH,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            max_grad_norm=0.0,
            disable_tqdm=True,
        )
        Trainer(clicks, arguments, train_dataset=Records(), optimizers=(optimizer, None)).train()
    return {"loss": loss_of(clicks), "ids": len(clicks.ids)}


def accelerate(
    folder: str, load: bool = False, saves_all: bool = True
) -> dict[str, float | int | str]:
    """accelerate's loop on the ranks of its launcher, saved; or loaded on any number of ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if saves_all:
        td.checkpoint.save_with(accelerator)
    clicks = Clicks(dist.group.WORLD if accelerator.num_processes > 1 else None)
    optimizer = torch.optim.Adam(clicks.parameters(), lr=0.01)
    td.step_with(optimizer, clicks)
    batches = torch.utils.data.DataLoader(samples(), batch_size=BATCH)
    model, optimizer, batches = accelerator.prepare(clicks, optimizer, batches)
    if load:
        accelerator.load_state(folder)
    else:
        for _ in range(4):
            for batch in batches:
                accelerator.backward(model(*batch)[0])
                optimizer.step()
                optimizer.zero_grad()
        try:
            accelerator.save_state(folder)
        except RuntimeError as error:
            models = len(list(Path(folder).glob("model*")))
            return {"error": str(error), "models": models, "rank": accelerator.process_index}
    result = {"loss": loss_of(clicks), "ids": len(clicks.ids), "rank": accelerator.process_index}
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return result


PROGRAMS: dict[str, Callable[..., dict[str, Any]]] = {
    "lightning": lambda: lightning(ddp=False),
    "lightning-ddp": lambda: lightning(ddp=True),
    "lightning-checkpoint": lambda: lightning(ddp=True, saves=True),
    "trainer": trainer,
    "accelerate": accelerate,
    "accelerate-load": lambda folder: accelerate(folder, load=True),
    "accelerate-alone": lambda folder: accelerate(folder, saves_all=False),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(PROGRAMS[sys.argv[1]](*sys.argv[2:])))
    if dist.is_initialized():
        dist.barrier()  # a thread of Gloo that wants Python's lock gets it here, not at the end
        dist.destroy_process_group()
