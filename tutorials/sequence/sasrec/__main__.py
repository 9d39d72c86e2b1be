"""SASRec with dynamic items in and out: ``python -m tutorials.sequence.sasrec``.

Items are looked up in a history, and searched for what comes next, in one table without a
vocabulary. The program compares losses with sampled negatives with ``nn.Embedding`` and a softmax
over all items: NDCG@10 and HR@10 of each user's next item after a time, items of the history left
out. Then the model is exported as one package that takes histories and gives ids and scores. The
package answers while the model trains on, and takes its changes from a delta log. It takes some
minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tutorials.sequence.sasrec.data import generate, split_at
from tutorials.sequence.sasrec.plot import plot
from tutorials.sequence.sasrec.serve import serve_and_train
from tutorials.sequence.sasrec.train import LOSSES, STATIC, Quality, Trainer, curve, quality_of

EXPORTED_AT = 0.8


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the losses, draw the plot, serve.

    Args:
        arguments: of the command line; None: those of this process.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--users", type=int, default=4000)
    parser.add_argument("--items", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=32, help="ratings of a user, at most")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("runs/sasrec"), metavar="FOLDER")
    parser.add_argument("--commits", type=int, default=3, help="while the package serves; 0: none")
    parser.add_argument("--json", action="store_true", help="JSON lines, no table")
    chosen = parser.parse_args(arguments)
    ratings = generate(chosen.users, chosen.items, chosen.steps)
    split = split_at(ratings, EXPORTED_AT)
    best = quality_of(split.best, split.wanted)
    curves: dict[str, list[Quality]] = {}
    if not chosen.json:
        print(f"{'':28s}NDCG@10   HR@10")
    for name in (STATIC, *LOSSES):
        curves[name] = curve(name, split, chosen.dim, chosen.epochs)
        _report(name, curves[name][-1], as_json=chosen.json)
    _report("planted probabilities", best, as_json=chosen.json)
    chosen.out.mkdir(parents=True, exist_ok=True)
    plot(chosen.out / "quality.png", curves, best)
    if chosen.commits > 0:
        trainer = Trainer("256 uniform", split, chosen.dim)
        for _ in range(chosen.epochs):
            trainer.epoch(split.histories)
        served = serve_and_train(
            trainer, ratings, EXPORTED_AT, chosen.out, commits=chosen.commits, compiled=True
        )
        print(json.dumps(served._asdict()))


def _report(name: str, quality: Quality, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"loss": name, **quality._asdict()}), flush=True)
    else:
        print(f"{name:28s}{quality.ndcg:7.4f}{quality.hit_rate:8.4f}", flush=True)


if __name__ == "__main__":
    main()
