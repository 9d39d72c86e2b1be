"""A server that follows a log and answers through a Unix socket."""

from __future__ import annotations

import sys
from multiprocessing.connection import Listener
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from online.model import CANARIES, Model

import torch_dynemb as td
from torch_dynemb import serving


def serve(log: Path, socket: Path) -> None:
    """Answer with the canaries' counts, and the events and batches that the model has seen."""
    torch.set_num_threads(1)
    model, reached = Model(), None
    while reached is None:
        try:
            reached = td.delta_log.replay(log, model)
        except (
            FileNotFoundError,
            td.errors.NewBaseNeededError,
        ):  # a newer base took its place meanwhile
            continue
    live = serving.live(model, headroom=1_000_000)
    follower = td.delta_log.follow(log, live, sequence=reached)
    follower.start(every_seconds=0.01)
    ids = torch.tensor([*CANARIES, *range(30)])
    socket.unlink(missing_ok=True)
    with Listener(str(socket), "AF_UNIX") as listener:
        while True:
            with listener.accept() as client:
                while client.poll(None):
                    try:
                        client.recv()
                    except EOFError:
                        break
                    follower.check()
                    counts, _, events, batches = live(ids)
                    canaries = [int(count) for count in counts[: len(CANARIES)]]
                    client.send((canaries, int(events), int(batches)))


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
