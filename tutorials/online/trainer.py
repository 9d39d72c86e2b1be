"""Reads events as they are written, trains, and publishes; goes on from its last commit."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import torch_dynemb as td
from tutorials.online.events import COLUMNS
from tutorials.online.growing_file import Tail
from tutorials.online.model import Training

BATCH = 256


def train(events: Path, log_path: Path, every_seconds: float) -> None:
    """Train until the events end.

    Args:
        events: the file of events.
        log_path: directory of the delta log.
        every_seconds: between two commits.
    """
    training = Training()
    loader: Any = StatefulDataLoader(Tail(events, COLUMNS, BATCH), batch_size=None)
    log = td.delta_log.DeltaLog(log_path, resume=True, every_seconds=every_seconds)
    state = td.delta_log.resume(log, training.model, progress=False).state
    if state is not None:
        training.dense_optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])

    def state_now() -> dict[str, Any]:
        return {"optimizer": training.dense_optimizer.state_dict(), "loader": loader.state_dict()}

    for batch in loader:
        training.step(batch)
        log.step(state=state_now)
    log.publish(state=state_now)
    log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("events", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--every-seconds", type=float, default=0.5)
    parser.add_argument("--standby", action="store_true", help="wait for a line before it trains")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.standby and not sys.stdin.readline():
        return  # the input has ended
    train(options.events, options.log, options.every_seconds)


if __name__ == "__main__":
    main()
