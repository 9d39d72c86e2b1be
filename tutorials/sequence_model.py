"""A sequence model with ragged features: ``python -m tutorials.sequence_model``.

A click model that looks at earlier clicks of a user, with ragged features and RecIS's names: target
attention (DIN) over a history of 1 to 50 clicks. What to look at, in ``tutorials/sequence``:

* ``model.py``: one EmbeddingEngine for all features. A ``RaggedTensor`` holds the histories. They
  are looked up as rows side by side (``combiner="tile"``) and as a weighted mean, in the table of
  the candidate item (``shared_name="item"``).
* ``train.py``: the loop with two optimizers, ``SparseAdam`` for rows and ``torch.optim.Adam`` for
  the network. With several processes only the network is wrapped in DistributedDataParallel: the
  engine spreads its tables over the ranks.
* ``data.py``: the shop that generates the clicks.

It takes half a minute, prints a JSON line and draws ``runs/sequence/training.png``. ``--help`` has
the options; ``--nproc 2`` gives the same result on two processes, ``--compile`` the same in one
compiled graph, ``--no-history`` the model that knows users and items only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tutorials.ranks import run_on_ranks, silence, started_by_torchrun
from tutorials.sequence.options import Options, parse
from tutorials.sequence.plot import plot
from tutorials.sequence.train import Trained, train, world_size


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        arguments: Of the command line; None for those of this process.
    """
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if started_by_torchrun():
        result = run_as_rank(options)
    elif options.nproc > 1:
        result = run_on_ranks(options.nproc, run_as_rank, options)
    else:
        result = run(options)
    if result is not None:
        print(json.dumps(result))


def run_as_rank(options: Options) -> dict[str, Any] | None:
    """Join the other ranks, then :func:`run`; the result is rank 0's."""
    silence()
    dist.init_process_group("gloo")
    try:
        return run(options)
    finally:
        dist.destroy_process_group()


def run(options: Options) -> dict[str, Any] | None:
    """Train, evaluate, plot.

    Returns:
        What the program prints at its end; None on ranks other than 0.
    """
    torch.set_num_threads(options.threads)
    models = {}
    if options.history:
        models["with history"] = train(options, "with history", history=True)
    models["without history"] = train(options, "without history", history=False)
    if dist.is_initialized() and dist.get_rank() > 0:
        return None
    plot(options.out / "training.png", models)
    return _summary(options, list(models.values()))


def _summary(options: Options, models: list[Trained]) -> dict[str, Any]:
    first = models[0]
    return {
        "auc": first.auc,
        "baseline_auc": models[1].auc if len(models) > 1 else None,
        "best_auc": first.best_auc,
        "history": options.history,
        "ids": first.ids,
        "steps": options.steps,
        "samples": options.steps * options.batch_size,
        "seconds": round(first.seconds, 2),
        "world_size": world_size(),
        "compiled": options.compile,
    }


if __name__ == "__main__":
    main()
