"""Write planted samples as a file in the Criteo format, once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from tutorials.dlrm.metrics import exact_auc
from tutorials.dlrm.parsing import (
    CATEGORY_COUNT,
    INTEGER_COUNT,
    MISSING_ID,
    MISSING_INTEGER,
    Int64Array,
)
from tutorials.dlrm.planted import CHUNK, Float64Array, PlantedConfig, PlantedModel, Samples

_LAYOUT = 1  # raise it when the same configuration is to give other files
_INTEGER_DIGITS = 8
_HEX_DIGITS = 8
_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)


class GeneratedData(NamedTuple):
    """A generated file and what is known about it."""

    path: Path
    probabilities: Float64Array  # (N,) of a click, line by line
    distinct_ids: int  # over all features
    late_share: float  # of them, first seen in the second half

    def best_auc(self, begin: int) -> float:
        """Return the AUC of the planted probabilities from line ``begin`` (0-based) on."""
        labels = np.load(self.path.with_name("labels.npy"))
        return exact_auc(labels[begin:], self.probabilities[begin:])


def generate(config: PlantedConfig, folder: Path) -> GeneratedData:
    """Write the samples of a configuration, unless that has been done before.

    Args:
        config: What to write.
        folder: Holds a folder of its own for every configuration; made if there is none. A folder
            appears under its name only once it is complete.

    Returns:
        The file and its planted probabilities.
    """
    key = json.dumps([_LAYOUT, asdict(config)], sort_keys=True).encode()
    name = f"planted-{config.samples}-seed{config.seed}-{hashlib.sha256(key).hexdigest()[:10]}"
    final = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    if not final.exists():
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
            if not final.exists():
                partial = folder / f"{name}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                _write(PlantedModel(config), partial)
                partial.rename(final)
    summary = json.loads((final / "summary.json").read_text())
    return GeneratedData(
        path=final / "samples.tsv",
        probabilities=np.load(final / "probabilities.npy"),
        distinct_ids=summary["distinct_ids"],
        late_share=summary["late_share"],
    )


def format_lines(samples: Samples) -> bytes:
    """Write samples as lines of text.

    Args:
        samples: Integers of up to 8 digits, ids below 2**32 (written with 8 digits), or missing.

    Raises:
        ValueError: An integer or an id is out of that range.
    """
    count = len(samples.labels)
    width = 2 + INTEGER_COUNT * (2 + _INTEGER_DIGITS) + CATEGORY_COUNT * (1 + _HEX_DIGITS)
    # Every line is laid out with all fields at full width; then the unused bytes are dropped.
    text = np.full((count, width), ord("\t"), dtype=np.uint8)
    used = np.ones((count, width), dtype=bool)
    text[:, 0] = _DIGITS[samples.labels.astype(np.intp)]
    column = 1
    for integers in samples.integers.T:
        column += 1
        end = column + 1 + _INTEGER_DIGITS
        _write_integers(integers, text[:, column:end], used[:, column:end])
        column = end
    for ids in samples.ids:
        column += 1
        end = column + _HEX_DIGITS
        missing = ids == MISSING_ID
        if np.any(~missing & (ids >> 4 * _HEX_DIGITS != 0)):
            raise ValueError("samples.ids must lie below 2**32 or be missing; generate smaller ids")
        for position in range(_HEX_DIGITS):
            text[:, end - 1 - position] = _DIGITS[ids >> 4 * position & 15]
        used[missing, column:end] = False
        column = end
    text[:, column] = ord("\n")
    return text[used].tobytes()


def _write_integers(
    integers: Int64Array, text: npt.NDArray[np.uint8], used: npt.NDArray[np.bool_]
) -> None:
    """Write a column, right-aligned behind one byte for a sign."""
    missing = integers == MISSING_INTEGER
    rest = np.abs(np.where(missing, 0, integers))
    if rest.max(initial=0) >= 10**_INTEGER_DIGITS:
        raise ValueError(
            f"samples.integers must have at most {_INTEGER_DIGITS} digits, got {rest.max()}; "
            "generate smaller integers"
        )
    for position in range(_INTEGER_DIGITS):
        place = _INTEGER_DIGITS - position
        used[:, place] = ~missing & ((rest > 0) | (position == 0))
        tenth = rest // 10
        text[:, place] = _DIGITS[rest - 10 * tenth]
        rest = tenth
    # The sign stands before the unused places: dropping those closes the gap.
    text[:, 0] = ord("-")
    used[:, 0] = (integers < 0) & ~missing


def _write(model: PlantedModel, folder: Path) -> None:
    config = model.config
    labels, probabilities = [], []
    newcomers = _NewcomerCount(config.samples)
    with (
        (folder / "samples.tsv").open("wb") as file,
        tqdm(total=config.samples, desc="generating", unit=" samples", unit_scale=True) as bar,
    ):
        for begin in range(0, config.samples, CHUNK):
            end = min(begin + CHUNK, config.samples)
            samples = model.draw(begin, end)
            file.write(format_lines(samples))
            newcomers.add(samples.ids)
            labels.append(samples.labels)
            probabilities.append(samples.probabilities)
            bar.update(end - begin)
        file.flush()
        os.fsync(file.fileno())
    np.save(folder / "labels.npy", np.concatenate(labels))
    np.save(folder / "probabilities.npy", np.concatenate(probabilities))
    summary = {"config": asdict(config), **newcomers.summary()}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


class _NewcomerCount:
    """Counts distinct ids, and those first seen in the second half of the samples."""

    def __init__(self, samples: int) -> None:
        self._half = samples // 2
        self._first_seen: list[tuple[Int64Array, Int64Array]] = [
            (np.empty(0, np.int64), np.empty(0, np.int64)) for _ in range(CATEGORY_COUNT)
        ]
        self._count = 0

    def add(self, ids: Int64Array) -> None:
        for feature, column in enumerate(ids):
            known, first = self._first_seen[feature]
            both = np.concatenate([known, column])
            when = np.concatenate([first, self._count + np.arange(len(column))])
            distinct, index = np.unique(both, return_index=True)
            self._first_seen[feature] = distinct, when[index]
        self._count += ids.shape[1]

    def summary(self) -> dict[str, Any]:
        distinct = sum(len(known) for known, _ in self._first_seen)
        late = sum(int((first >= self._half).sum()) for _, first in self._first_seen)
        return {"distinct_ids": distinct, "late_share": late / distinct}
