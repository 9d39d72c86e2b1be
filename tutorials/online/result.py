"""Results of a run by windows of time, and their plot."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tutorials.dlrm.metrics import exact_auc
from tutorials.dlrm.sweeps.style import BLUE, GREY, ORANGE, RED, STYLE, WIDTH

WINDOWS = 8  # of a day
Numbers = np.ndarray[Any, np.dtype[Any]]


class Result(NamedTuple):
    """Numbers by window of time.

    Attributes:
        days: end of each window, in days.
        online: AUC of the model that learns while it serves.
        daily: AUC of the model that is retrained each night.
        best: AUC of the true chances.
        age_p50, age_p99: age of events at the first answer that knows them, in seconds.
        day: seconds of a day.
        events: number of events.
        late: number of events that the model knew before it was asked for them.
        killed: when the trainer was killed, in days.
    """

    days: list[float]
    online: list[float]
    daily: list[float]
    best: list[float]
    age_p50: list[float]
    age_p99: list[float]
    day: float
    events: int
    late: int
    killed: float

    def save(self, path: Path) -> None:
        """Write a JSON file."""
        rounded = {
            name: [round(of, 4) for of in values] if isinstance(values, list) else values
            for name, values in self._asdict().items()
        }
        path.write_text(json.dumps(rounded, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Result:
        """Read a JSON file."""
        return Result(**json.loads(path.read_text()))

    def summary(self) -> str:
        """Return the AUC of both, averaged from the second day on, and the freshness."""
        late = [number for number, day in enumerate(self.days) if day > 1]
        mean = {
            name: float(np.mean([values[of] for of in late]))
            for name, values in (("online", self.online), ("daily", self.daily))
        }
        return (
            f"{self.events} events, AUC from the second day on: {mean['online']:.3f} online, "
            f"{mean['daily']:.3f} retrained daily; age of events at the first answer that knows "
            f"them: p50 {np.median(self.age_p50):.2f} s, p99 {np.median(self.age_p99):.2f} s"
        )


def auc_by_window(
    days: Numbers, clicks: Numbers, scores: Numbers
) -> tuple[list[float], list[float]]:
    """Return the ends of windows in days, and the AUC in each.

    Args:
        days: float [n], the day of each event, ascending.
        clicks: int64 [n].
        scores: float [n].
    """
    ends = np.arange(1, int(days[-1] * WINDOWS) + 1) / WINDOWS
    places = np.searchsorted(days, ends)
    begins = [0, *places[:-1]]
    found = [
        exact_auc(clicks[begin:end], scores[begin:end])
        for begin, end in zip(begins, places, strict=True)
    ]
    return ends.tolist(), found


def quantiles_by_window(days: Numbers, ages: Numbers, ends: list[float]) -> Numbers:
    """Return p50 and p99 of ages in each window, float [windows, 2].

    Args:
        days: float [n], the day of each event, ascending.
        ages: float [n], in seconds.
        ends: ends of the windows, in days.
    """
    places = np.searchsorted(days, [0.0, *ends])
    pairs = pairwise(places.tolist())
    return np.array([np.quantile(ages[begin:end], [0.5, 0.99]) for begin, end in pairs])


def plot(result: Result, path: Path) -> None:
    """Draw AUC and freshness by time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    middles = [day - 0.5 / WINDOWS for day in result.days]
    with plt.rc_context(STYLE):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(WIDTH, 4.6), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        above.plot(middles, result.best, color=GREY, ls=":", label="true chances")
        above.plot(middles, result.online, color=BLUE, label="learns while it serves")
        above.plot(middles, result.daily, color=ORANGE, label="retrained each night")
        above.set_title("AUC of clicks that the model has not seen")
        above.set_ylim(0.42, 0.95)
        above.legend(loc="lower right", ncols=3)
        below.plot(middles, result.age_p99, color=BLUE, ls="--", label="p99")
        below.plot(middles, result.age_p50, color=BLUE, label="p50")
        below.set_yscale("log")
        below.set_yticks([0.2, 0.5, 1, 2, 5, 10], ["0.2", "0.5", "1", "2", "5", "10"])
        below.minorticks_off()
        below.set_title("Seconds from an event to the first answer that knows it")
        below.set_xlabel(f"simulated days, of {result.day:g} seconds")
        below.set_xticks(range(round(result.days[-1]) + 1))
        for axis in (above, below):
            axis.axvline(result.killed, color=RED, ls="--", lw=1)
        below.annotate(
            "the trainer is killed, another one goes on",
            (result.killed, 0.55),
            xycoords=("data", "axes fraction"),
            xytext=(-4, -2),
            textcoords="offset points",
            ha="right",
            va="top",
            color=RED,
        )
        below.legend(loc="upper left")
        figure.savefig(path)
        plt.close(figure)
