"""Follows the delta log, and answers through a Unix socket.

``tutorials/serving`` has HTTP servers of compiled packages, which follow a log in the same way.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Listener
from pathlib import Path

import torch

import torch_dynemb as td
from tutorials.online.model import Clicks


def serve(log: Path, socket: Path) -> None:
    """Answer with the chances of clicks, and the number of events that the model knows."""
    model = Clicks()
    td.checkpoint.load(log / "base", model, progress=False)
    live = td.serving.live(model, headroom=100_000)
    follower = td.delta_log.follow(log, live, base=log / "base")
    follower.update()
    follower.start(every_seconds=0.01)
    with Listener(str(socket), "AF_UNIX") as listener:
        while True:
            with listener.accept() as client:
                while client.poll(None):
                    try:
                        users, ads = client.recv()
                    except EOFError:
                        break
                    follower.check()
                    logits, seen = live(torch.from_numpy(users), torch.from_numpy(ads))
                    client.send((torch.sigmoid(logits).detach().numpy(), int(seen)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
