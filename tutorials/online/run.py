"""Runs the whole loop: events, a trainer, a delta log, a server and a client, a process each.

    python -m tutorials.online.run

The trainer is killed once, and another one, which has waited for that, goes on. At the end the
program prints the AUC of the answers beside that of a model that is retrained each night, and draws
both with the age of events.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tutorials.online.client import Client
from tutorials.online.daily import daily_scores
from tutorials.online.events import AD, CLICK, COLUMNS, TIME, USER, World
from tutorials.online.growing_file import count_of, read
from tutorials.online.result import Result, auc_by_window, plot, quantiles_by_window


def program(name: str, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """Start a program of this folder."""
    command = [sys.executable, "-m", f"tutorials.online.{name}", *map(str, arguments)]
    return subprocess.Popen(command, **options)


def run(folder: Path, *, days: float, day: float, rate: float, every_seconds: float) -> Result:
    """Run the loop.

    Args:
        folder: of its files; it does not exist yet.
        days: simulated days.
        day: seconds of a day.
        rate: events of a second.
        every_seconds: between two commits.
    """
    folder.mkdir(parents=True)
    events, log = folder / "events", folder / "log"
    events.touch()
    # paths of sockets have at most 107 bytes
    sockets = tempfile.TemporaryDirectory(prefix="online-")
    socket = Path(sockets.name) / "socket"
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        running.append(program(name, *arguments, **options))
        return running[-1]

    def wait_for(what: str, is_there: Any) -> None:
        while not is_there():
            if any(process.poll() not in (None, 0) for process in running):
                raise RuntimeError(f"a program has ended while this one waits for {what}")
            time.sleep(0.005)

    trains = ("trainer", events, log, "--every-seconds", every_seconds)
    try:
        trainer, client = start(*trains), Client(events, socket)
        wait_for("the base of the log", (log / "base" / "manifest.json").exists)
        standby = start(*trains, "--standby", stdin=subprocess.PIPE)
        start("server", log, socket)
        wait_for("the server", client.connect)
        writer = start("events", events, "--rate", rate, "--day", day, stdin=subprocess.PIPE)
        wait_for("events", lambda: count_of(events, COLUMNS) > 0)
        began, killed = time.monotonic(), days / 2
        is_killed = False
        while (passed := (time.monotonic() - began) / day) < days:
            client.ask()
            if passed > killed and not is_killed:
                trainer.kill()
                trainer.wait()
                running.remove(trainer)
                assert standby.stdin is not None
                standby.stdin.write(b"\n")
                standby.stdin.flush()
                trainer, is_killed = standby, True
            time.sleep(0.01)
        writer.communicate(b"\n")  # ends it

        def knows_all() -> bool:
            client.ask()
            return client.answers[-1][1] == count_of(events, COLUMNS)

        wait_for("the last commit", knows_all)
    finally:
        for process in running:
            process.kill()
            process.wait()
        sockets.cleanup()
    return measured(events, client, day=day, killed=killed)


def measured(events: Path, client: Client, *, day: float, killed: float) -> Result:
    """Compare what a client has got with the model that is retrained each night."""
    all_events = read(events, COLUMNS, 0, count_of(events, COLUMNS))
    times = all_events[:, TIME]
    days = (times - times[0]) / 1e9 / day
    clicks = all_events[:, CLICK]
    ends, online = auc_by_window(days, clicks, np.concatenate(client.scores))
    _, daily = auc_by_window(days, clicks, daily_scores(all_events, days))
    best = World().chance(all_events[:, USER], all_events[:, AD], days)
    _, of_chances = auc_by_window(days, clicks, best)
    _, ages = client.ages()
    quantiles = quantiles_by_window(days[: len(ages)], ages, ends)
    return Result(
        ends,
        online,
        daily,
        of_chances,
        quantiles[:, 0].tolist(),
        quantiles[:, 1].tolist(),
        day=day,
        events=len(all_events),
        late=client.late,
        killed=killed,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/online"), metavar="FOLDER")
    parser.add_argument("--days", type=float, default=5.0, help="simulated (default 5)")
    parser.add_argument("--day", type=float, default=12.0, help="its seconds (default 12)")
    parser.add_argument("--rate", type=float, default=3000.0, help="events of a second")
    parser.add_argument(
        "--every-seconds", type=float, default=0.5, help="between commits (default 0.5)"
    )
    parser.add_argument("--plot", type=Path, help="draw it here (default: in the folder)")
    options = parser.parse_args(arguments)
    if options.out.exists():
        parser.error(f"--out is {options.out}, which exists: remove it, or name another folder")
    torch.set_num_threads(1)
    result = run(
        options.out,
        days=options.days,
        day=options.day,
        rate=options.rate,
        every_seconds=options.every_seconds,
    )
    picture = options.plot or options.out / "online.png"
    result.save(picture.with_suffix(".json"))
    plot(result, picture)
    print(result.summary())
    print(f"{picture} has the plot")


if __name__ == "__main__":
    main()
