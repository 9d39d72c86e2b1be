"""How often the interval of ``plan`` has the true number of distinct ids: prints a table.

Samples of generated streams, of Criteo files and of the words of text files are extrapolated to
the length of the whole; its distinct ids are counted.

    python tests/tools/extrapolations.py [--criteo FILE] [--words 'FOLDER/**/*.py']
"""

from __future__ import annotations

import argparse
import glob
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "plan"))

from generated_streams import STREAMS, Ids

from torch_dynemb.plan.counting import IdCounter, IdCounts
from torch_dynemb.plan.growth import distinct_ids
from torch_dynemb.plan.text import open_text

TIMES = (2, 4, 10, 30, 100)


class Trial(NamedTuple):
    """An extrapolation with a known truth.

    Attributes:
        times: from how much to how much.
        inside: whether the truth is in the interval.
        width: its upper end by its lower end.
        error: the estimate by the truth, as a logarithm.
    """

    times: int
    inside: bool
    width: float
    error: float


def counted(ids: Ids, kept: int) -> IdCounts:
    """The counts of a stream, one id a line."""
    counter = IdCounter(kept)
    for part in np.array_split(ids, max(1, len(ids) // 20_000)):
        counter.add(torch.from_numpy(part), torch.arange(len(part)), lines=len(part))
    return counter.counts()


def trials(stream: Ids, times: int, kept: int) -> Iterator[Trial]:
    """From a part of the whole stream to all of it, and of each of its quarters."""
    for parts in (1, 4):
        sample = len(stream) // times // parts
        if sample < 20:
            continue
        for part in range(parts):
            whole = stream[part * sample * times :][: sample * times]
            true = len(np.unique(whole))
            low, expected, high = distinct_ids(counted(whole[:sample], kept), times)
            inside = low * 0.999 <= true <= high * 1.001
            yield Trial(times, inside, high / low, abs(math.log(expected / true)))


def words(pattern: str, length: int) -> Ids:
    """The words of files in the order of their names, as numbers."""
    numbers: dict[str, int] = {}
    found: list[int] = []
    for path in sorted(glob.glob(pattern, recursive=True)):
        for word in re.findall(r"[A-Za-z_]+", Path(path).read_text(errors="replace")):
            found.append(numbers.setdefault(word, len(numbers)))
        if len(found) >= length:
            break
    return np.array(found[:length], dtype=np.int64)


def described(name: str, found: Mapping[int, list[Trial]]) -> Iterator[str]:
    """A line of the table for each number of times."""
    for times, group in found.items():
        if not group:
            continue
        inside = sum(trial.inside for trial in group)
        width, error = (
            np.median([getattr(trial, of) for trial in group]) for of in ("width", "error")
        )
        yield (
            f"{name:28} x{times:<4} inside {inside:4} of {len(group):4} "
            f"({inside / len(group):4.0%})  width {width:5.2f}  error {math.expm1(error):5.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--criteo", metavar="FILE", help="its 26 columns are streams")
    parser.add_argument("--words", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--length", type=int, default=1_000_000, help="of a generated stream")
    parser.add_argument("--kept", type=int, default=1 << 19, help="ids that are counted exactly")
    given = parser.parse_args()
    generated = {name: make(given.length, 1) for name, make in STREAMS.items()}
    sources = {"generated": list(generated.values())}
    sources["words"] = [words(pattern, given.length) for pattern in given.words]
    if given.criteo:
        columns = [batch.columns for batch in open_text(given.criteo, "criteo", None).batches()]
        sources["Criteo"] = [
            torch.cat([batch[name].ids for batch in columns]).numpy() for name in columns[0]
        ]
    for name, streams in sources.items():
        found = {
            times: [trial for ids in streams for trial in trials(ids, times, given.kept)]
            for times in TIMES
        }
        print("\n".join(described(name, found)), flush=True)


if __name__ == "__main__":
    main()
