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
import pyarrow as pa
from pyarrow import csv
from tqdm import tqdm

from tutorials.dlrm.data import (
    CATEGORY_COUNT,
    FEATURE_NAMES,
    MISSING_ID,
    MISSING_INTEGER,
    Int64Array,
)
from tutorials.dlrm.job.planted import CHUNK, Float64Array, PlantedConfig, PlantedModel, Samples
from tutorials.dlrm.metrics import exact_auc

_LAYOUT = 1  # raise it when the same configuration is to give other files
_WRITE = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")


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
        samples: Ids are below 2**32 (written with 8 digits), or missing.

    Raises:
        ValueError: An id is out of that range.
    """
    columns = {"label": pa.array(samples.labels.astype(np.int8))}
    for number, integers in enumerate(samples.integers.T):
        columns[f"integer_{number}"] = pa.array(integers, mask=integers == MISSING_INTEGER)
    for name, ids in zip(FEATURE_NAMES, samples.ids, strict=True):
        missing = ids == MISSING_ID
        if np.any(~missing & (ids >> 32 != 0)):
            raise ValueError("samples.ids must lie below 2**32 or be missing; generate smaller ids")
        digits = np.frombuffer(ids.astype(">u4").tobytes().hex().encode(), "S8")
        columns[name] = pa.array(digits, mask=missing).cast(pa.string())
    lines = pa.BufferOutputStream()
    csv.write_csv(pa.table(columns), lines, _WRITE)
    return lines.getvalue().to_pybytes()


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
