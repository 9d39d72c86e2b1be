"""A model that answers while it trains on: a package, or a copy, that follows a delta log."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import torch_dynemb as td
from tutorials.sequence.sasrec.data import Ratings, split_at
from tutorials.sequence.sasrec.model import Retriever
from tutorials.sequence.sasrec.train import BATCH, Trainer

Answer = tuple[Tensor, Tensor]


class ServingCounts(NamedTuple):
    """Counts of a model that served while it trained.

    Attributes:
        answers: how many batches of histories were answered beside the training.
        commits: of the delta log that were applied.
        new_items: items in the last answers that the model had not known when it was exported.
        apart: largest difference between the last scores and those of the trained model.
    """

    answers: int
    commits: int
    new_items: int
    apart: float


def package(
    retriever: Retriever, folder: Path, example: Tensor, headroom: int
) -> td.serving.ServedModel:
    """Export a model as one package, and load it so that it follows the log.

    Args:
        retriever: attached to the log in ``folder / "log"``.
        folder: gets the package.
        example: int64 [B, L], histories.
        headroom: how many more items there may be.
    """
    batch = torch.export.Dim("batch")
    td.serving.export(
        retriever,
        folder / "package",
        (example,),
        dynamic_shapes=({0: batch},),
        headroom=headroom,
        base=folder / "log" / "base",
    )
    return td.serving.load(folder / "package", follow=folder / "log")


def serve_and_train(
    trainer: Trainer, ratings: Ratings, begin: float, folder: Path, *, commits: int, compiled: bool
) -> ServingCounts:
    """Serve a model while it trains on later and later ratings.

    Args:
        trainer: of a model with dynamic items, trained on the ratings before ``begin``.
        ratings: of all users.
        begin: the time of the export.
        folder: gets the delta log and the package.
        commits: times at which what has changed is published.
        compiled: whether a package answers, or a copy in this process, which needs no compiler.
    """
    retriever = Retriever(trainer.model).eval()
    log = td.delta_log.DeltaLog(folder / "log")
    log.attach(retriever)
    items = trainer.model.items
    assert isinstance(items, td.DynamicEmbedding)
    known = items.ids()
    histories = split_at(ratings, begin).known[:BATCH]
    room = len(ratings.ids.unique())
    answer: Callable[[Tensor], Answer]
    if compiled:
        served = package(retriever, folder, histories, room)
        answer, follower = served.run, served.follower
    else:
        answer = td.serving.live(retriever, headroom=room)
        follower = td.delta_log.follow(folder / "log", answer, base=folder / "log" / "base")
    ended = threading.Event()
    counted = 0

    def ask() -> None:
        nonlocal counted
        while not ended.is_set() or counted == 0:
            answer(histories)
            counted += 1

    asking = threading.Thread(target=ask)
    asking.start()
    follower.start()
    try:
        for commit in range(1, commits + 1):
            trainer.model.train()
            now = begin + (1.0 - begin) * commit / commits
            trainer.epoch(split_at(ratings, now).histories)
            published = log.publish()
            log.flush()
            while follower.sequence != published:
                follower.check()
    finally:
        ended.set()
        asking.join()
        follower.stop()
        log.close()
    with torch.no_grad():
        expected = retriever.eval()(histories)[1]
        ids, scores = answer(histories)
    new = ids.unique()[~torch.isin(ids.unique(), known)]
    apart = float((scores - expected).abs().max())
    return ServingCounts(counted, commits, len(new), apart)
