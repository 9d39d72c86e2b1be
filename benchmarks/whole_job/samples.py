"""Samples of the job, and the vocabulary that tables of a fixed size need of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tutorials.dlrm.data import CriteoReader
from tutorials.dlrm.job.planted import CHUNK, PlantedConfig, PlantedModel
from tutorials.dlrm.model import dense_features


class Samples(NamedTuple):
    """Consecutive samples as the model takes them.

    Attributes:
        dense: float32 (N, 26).
        ids: int64 (26, N).
        labels: float32 (N,).
    """

    dense: Tensor
    ids: Tensor
    labels: Tensor

    def part(self, begin: int, end: int) -> Samples:
        """Return samples ``begin`` to ``end``, contiguous."""
        here = slice(begin, end)
        return Samples(self.dense[here], self.ids[:, here].contiguous(), self.labels[here])


class Vocabulary(NamedTuple):
    """Vocabulary that a table of a fixed size needs before it can be trained.

    Attributes:
        sizes: ids by feature.
        rows: int64 (26, N), the place of each id of the samples among those of its feature.
        seconds: that it took to find the ids, sorted, each once.
        mapping_seconds: that it took to look up the places of all ids of the samples.
    """

    sizes: list[int]
    rows: Tensor
    seconds: float
    mapping_seconds: float


def generated(count: int, cardinality_divisor: float) -> Samples:
    """Return the first samples of the stream that ``make train`` generates.

    Args:
        count: of the samples.
        cardinality_divisor: as in :class:`tutorials.dlrm.job.planted.PlantedConfig`.
    """
    samples = max(count, PlantedConfig.samples)
    model = PlantedModel(PlantedConfig(samples, cardinality_divisor=cardinality_divisor))
    drawn = model.draw(0, -(-count // CHUNK) * CHUNK)
    return Samples(
        dense_features(drawn.integers[:count]),
        torch.from_numpy(np.ascontiguousarray(drawn.ids[:, :count])),
        torch.from_numpy(drawn.labels[:count]),
    )


def read(paths: Sequence[Path], count: int) -> Samples:
    """Return the first samples of files in the Criteo format.

    Raises:
        ValueError: there are fewer.
    """
    batches = list(CriteoReader(paths, CHUNK, stop_line=count))
    have = sum(len(batch.labels) for batch in batches)
    if have < count:
        raise ValueError(
            f"files: {', '.join(map(str, paths))} have {have:,} samples, expected {count:,}: give "
            "more files, or smaller --rounds or --fill"
        )
    return Samples(
        torch.cat([dense_features(batch.integers) for batch in batches]),
        torch.from_numpy(np.concatenate([batch.ids for batch in batches], axis=1)),
        torch.from_numpy(np.concatenate([batch.labels for batch in batches])),
    )


def make_vocabulary(ids: Tensor) -> Vocabulary:
    """Sort the ids of each feature and replace every one by its place.

    Args:
        ids: int64 (26, N).
    """
    columns = ids.numpy()
    begin = time.perf_counter()
    known = [np.unique(column) for column in columns]
    made = time.perf_counter()
    rows = [np.searchsorted(of, column) for of, column in zip(known, columns, strict=True)]
    ended = time.perf_counter()
    return Vocabulary(
        [len(of) for of in known], torch.from_numpy(np.stack(rows)), made - begin, ended - made
    )
