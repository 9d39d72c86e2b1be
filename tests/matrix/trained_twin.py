"""A table in numpy, float64, that trains beside a dynamic one: rows, state and scores by id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from oracle import initial_state, optimizer_step
from torch import Tensor

import torch_dynemb as td

Floats = NDArray[np.float64]
FREQUENCIES = ("frequency", "step", "timestamp", "custom")


@dataclass
class Twin:
    """A table.

    Attributes:
        optimizer: of which the formula is taken.
        dtype: that rows are rounded to.
        initial: id -> its initial row.
        padding_idx: id without a row.
        threshold: occurrences until an id gets a row.
        forgets: whether an id that gets a row is counted from 0 when it has lost it.
        ttl: seconds until an id expires.
        rows, state, scores: by id; scores by their name.
        waiting: occurrences of ids without a row.
        steps: that have ended.
        first_step: at which the optimizer began.
        now: seconds.
        columns: shards with as many columns each, which have their own state of a row.
    """

    optimizer: td.optim.OptimizerConfig
    dtype: torch.dtype
    initial: Callable[[int], Floats]
    padding_idx: int | None = None
    threshold: int = 1
    forgets: bool = True
    ttl: int | None = None
    rows: dict[int, Floats] = field(default_factory=dict)
    state: dict[int, list[Floats]] = field(default_factory=dict)
    scores: dict[int, dict[str, int]] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    first_step: int = 0
    now: int = 0
    columns: int = 1

    def train(self, gradients: Mapping[int, Floats], seen: Mapping[int, int], custom: int) -> None:
        """Look ids up, and take a step.

        Args:
            gradients: of rows, summed over the occurrences of an id.
            seen: occurrences by id.
            custom: score of the lookup.
        """
        self.steps += 1
        for id, count in seen.items():
            if id == self.padding_idx or not self._admits(id, count):
                continue
            scores = self.scores.setdefault(id, dict.fromkeys(FREQUENCIES, 0))
            scores |= {"step": self.steps - 1, "timestamp": self.now, "custom": custom}
            scores["frequency"] += count
            self.scores[id] = scores
            row = self.rows.get(id, self.initial(id))
            state = self.state.get(id) or self.initial_state(len(row))
            moved = [
                optimizer_step(self.optimizer, self.steps - self.first_step, *of)
                for of in zip(
                    np.split(row, self.columns),
                    np.split(gradients[id], self.columns),
                    self._by_columns(state),
                    strict=True,
                )
            ]
            self.rows[id] = self.rounded(np.concatenate([of for of, _ in moved]))
            self.state[id] = [
                np.concatenate(of) for of in zip(*(after for _, after in moved), strict=True)
            ]

    def initial_state(self, dim: int) -> list[Floats]:
        """Return the state of a row that has not moved; with a value per row, of each shard."""
        parts = [initial_state(self.optimizer, dim // self.columns) for _ in range(self.columns)]
        return [np.concatenate(of) for of in zip(*parts, strict=True)]

    def _by_columns(self, state: list[Floats]) -> list[list[Floats]]:
        return [[np.split(of, self.columns)[part] for of in state] for part in range(self.columns)]

    def take_state(self, other: Twin) -> None:
        """Take the state of a twin: a value per row is the mean over the new columns."""
        self.state = {}
        for id, state in other.state.items():
            dim = len(other.rows[id])
            self.state[id] = [
                np.repeat(of, dim // other.columns).reshape(self.columns, -1).mean(1)
                if tensor.per_row
                else of
                for tensor, of in zip(other.optimizer.state, state, strict=True)
            ]

    def _admits(self, id: int, count: int) -> bool:
        if id in self.rows:
            return True
        total = self.waiting.get(id, 0) + count
        if total < self.threshold:
            self.waiting[id] = total
        elif self.forgets:
            self.waiting.pop(id, None)
        return total >= self.threshold

    def rounded(self, row: Floats) -> Floats:
        """Return a row of the table's dtype."""
        return torch.from_numpy(row).to(self.dtype).double().numpy()

    def convert(self, dtype: torch.dtype) -> None:
        """Round all rows to a dtype."""
        self.dtype = dtype
        self.rows = {id: self.rounded(row) for id, row in self.rows.items()}

    def restart_optimizer(self, optimizer: td.optim.OptimizerConfig) -> None:
        """Begin with an optimizer that has seen nothing."""
        self.optimizer, self.state, self.first_step = optimizer, {}, self.steps

    def assign(self, id: int, row: Floats, custom: int) -> None:
        """Set a row, which counts as seen once."""
        self.rows[id] = row
        self.scores[id]["frequency"] += 1
        self.scores[id] |= {"step": self.steps, "timestamp": self.now, "custom": custom}

    def drop(self, id: int) -> None:
        """Forget a row, and what belongs to it."""
        for of in (self.rows, self.state, self.scores):
            of.pop(id, None)  # type: ignore[attr-defined]

    def expired(self, id: int) -> bool:
        """Return whether the ttl of an id has passed."""
        return self.ttl is not None and self.scores[id]["timestamp"] + self.ttl < self.now

    def reads(self, id: int) -> Floats:
        """Return what a lookup outside of training returns."""
        if id == self.padding_idx:
            return np.zeros_like(self.initial(id))
        if id not in self.rows or self.expired(id):
            return self.initial(id)
        return self.rows[id]

    def keep_only(self, ids: Tensor) -> None:
        """Drop the ids that an eviction has taken: which, its own oracle says."""
        for id in {*self.rows} - {*ids.tolist()}:
            self.drop(id)
