"""A trainer that reads events, trains, and publishes; it goes on from its last commit."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))

from online.events import BATCH, COLUMNS
from online.model import Training

import torch_dynemb as td
from tutorials.online.growing_file import Tail

EVERY_SECONDS = 0.5
BASE_COMMITS = 20  # a restart reads the base and about as many commits


def train(events: Path, log_path: Path | None) -> dict[str, Any]:
    """Train until the events end.

    Returns:
        Seconds of the load, of the first commit after the load, of training, and in publishes.
    """
    torch.set_num_threads(1)
    training = Training()
    loader: Any = StatefulDataLoader(Tail(events, COLUMNS, BATCH), batch_size=None)
    log, based = None, 0
    times = {"load_s": 0.0, "first_commit_s": 0.0, "train_s": 0.0, "publish_s": 0.0}
    if log_path is not None:
        log = td.delta_log.DeltaLog(log_path, resume=True, every_seconds=EVERY_SECONDS, retain="5s")
        began = time.perf_counter()
        state = td.delta_log.resume(log, training.model, progress=False).state
        times["load_s"] = time.perf_counter() - began
        if state is not None:
            training.dense_optimizer.load_state_dict(state["optimizer"])
            loader.load_state_dict(state["loader"])
            based = state["based"]

    def state_now() -> dict[str, Any]:
        optimizer = training.dense_optimizer.state_dict()
        return {"optimizer": optimizer, "loader": loader.state_dict(), "based": based}

    loaded = began = time.perf_counter()
    for batch in loader:
        ids = batch[:, 0].contiguous()
        before = time.perf_counter()
        training.step(ids)
        after = time.perf_counter()
        times["train_s"] += after - before
        if log is not None:
            published = log.step(state=state_now)
            times["publish_s"] += time.perf_counter() - after
            if published is not None and not times["first_commit_s"]:
                log.flush()
                times["first_commit_s"] = time.perf_counter() - loaded
                print(json.dumps(times | {"cpu_s": time.process_time()}), flush=True)
            if log.sequence >= based + BASE_COMMITS:
                based = log.sequence
                log.save(state=state_now, asynchronous=True)
    times["whole_s"] = time.perf_counter() - began
    if log is not None:
        log.publish(state=state_now)
        log.close()
    return times


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("events", type=Path)
    arguments.add_argument("--log", type=Path)
    options = arguments.parse_args()
    print(json.dumps(train(options.events, options.log)), flush=True)


if __name__ == "__main__":
    main()
