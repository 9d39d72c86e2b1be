"""Two towers on a stream of events, a folder of Parquet files a day.

    python -m tutorials.parquet_days                    # trains on six generated days
    python -m tutorials.parquet_days --stop-after 100   # ends in the middle of a day
    python -m tutorials.parquet_days --resume           # goes on there

It predicts each day before it trains on it. ``tutorials/guides/data.md`` explains the program.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MetricCollection
from torchmetrics.retrieval import RetrievalNormalizedDCG, RetrievalRecall
from tqdm import tqdm

import torch_dynemb as td
from tutorials.parquet_days.generate import write_days
from tutorials.parquet_days.reader import BATCH, Day

DIM, SAVE_EVERY = 32, 50


class TwoTowers(nn.Module):
    """Users with a layer on top, and items that are forgotten by a half-life of a week."""

    def __init__(self) -> None:
        super().__init__()
        policy = td.Policy(score="decayed", half_life="7d", capacity=100_000)
        adam = td.Adam(lr=0.02)
        self.users = td.DynamicEmbedding(DIM, name="users", optimizer=adam)
        self.items = td.DynamicEmbedding(DIM, name="items", optimizer=adam, policy=policy)
        self.layer = nn.Linear(DIM, DIM)
        nn.init.eye_(self.layer.weight)

    def forward(self, users: Tensor) -> Tensor:
        queries: Tensor = self.layer(self.users(users))
        return queries


@torch.no_grad()
def quality(model: TwoTowers, batches: Iterable[dict[str, Any]]) -> dict[str, Tensor]:
    """Return recall@10 and NDCG@10 of events that the model has not seen, by an exact search."""
    metrics = MetricCollection([RetrievalRecall(top_k=10), RetrievalNormalizedDCG(top_k=10)])
    model.eval()
    for number, batch in enumerate(batches):
        found = td.top_k(model(batch["users"]), model.items, 10)
        wanted = found.ids == batch["items"][:, None]
        queries = number * BATCH + torch.arange(len(wanted))
        metrics.update(found.scores, wanted, indexes=queries[:, None].expand_as(wanted))
    model.train()
    return metrics.compute()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("runs/parquet_days/events"))
    parser.add_argument("--out", type=Path, default=Path("runs/parquet_days/last"))
    parser.add_argument("--workers", type=int, default=0, help="processes that read")
    parser.add_argument("--stop-after", type=int, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="go on from --out")
    chosen = parser.parse_args(arguments)
    if not chosen.data.exists():
        write_days(chosen.data, days=6, events=10_000)

    torch.manual_seed(0)
    model, names = TwoTowers(), td.IdNames(capacity=100_000)
    optimizer = torch.optim.Adam(model.layer.parameters(), lr=0.002)
    td.step_with(optimizer, model)
    loss_of = td.SampledSoftmaxLoss(
        model.items, negatives=td.UniformNegatives(256), temperature=0.3
    )
    state: dict[str, Any] = {"day": "", "step": 0}
    if chosen.resume:
        state = td.checkpoint.load(chosen.out, model, progress=False).state
        optimizer.load_state_dict(state["optimizer"])
        names.load_state_dict(state["names"])
        torch.set_rng_state(state["random"])
    step = state["step"]
    for day in sorted(folder.name for folder in chosen.data.iterdir()):
        if day < state["day"]:
            continue
        draws = torch.Generator()  # a loader draws a seed, and negatives are drawn from torch's own
        options = {"batch_size": None, "num_workers": chosen.workers, "generator": draws}
        loader: Any = StatefulDataLoader(Day(chosen.data / day), **options)
        if day == state["day"]:
            loader.load_state_dict(state["loader"])
        elif step > 0:
            values = quality(model, islice(Day(chosen.data / day), 8))
            print(day, *(f"{name} {float(value):.4f}" for name, value in values.items()))
        for batch in tqdm(loader, desc=day, unit=" batches"):
            model.items.group.clock.set_now(batch["now"])
            optimizer.zero_grad()
            loss_of(model(batch["users"]), batch["items"]).backward()
            optimizer.step()
            names.add(batch["items"], batch["names"])
            step += 1
            if step % SAVE_EVERY == 0 or step == chosen.stop_after:
                random = torch.get_rng_state()
                state = {"day": day, "step": step, "random": random, "loader": loader.state_dict()}
                state |= {"optimizer": optimizer.state_dict(), "names": names.state_dict()}
                td.checkpoint.save(chosen.out, model, state=state, progress=False)
            if step == chosen.stop_after:
                return
    found = td.top_k(model.eval()(td.hash_strings(["user-7"])), model.items, 5)
    print("user-7:", *names.of(found.ids[0]))


if __name__ == "__main__":
    main()
