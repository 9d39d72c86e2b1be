"""A group of tables in plain Python: the integers and values that the library must have.

Tables are dicts, rows are float64 vectors, and nothing is hashed into buckets. Initial values are
those of ``Uniform``, from Philox4x32-10 written out once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_dynemb import (
    LAMB,
    LARSSGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamWTF,
    AMSGrad,
    Ftrl,
    GroupFtrl,
    MomentumSGD,
    RMSprop,
    RowWiseAdagrad,
    RowWiseRMSprop,
    SmartDecayAdam,
    TableGroup,
    Uniform,
)
from torch_dynemb.ops.columns import BUCKET_WIDTH
from torch_dynemb.optim import OptimizerConfig

Ids = Sequence[int]
MIN_BUCKETS = 64 // BUCKET_WIDTH


class TableFullError(Exception):
    """The table lacks room for the new ids of a call."""


class OwnedRow(NamedTuple):
    """What a backward has written: valid for the owner with this handle."""

    handle: int
    weight: np.ndarray
    state: list[np.ndarray]


def philox(seed: int, id: int, block: int) -> list[int]:
    """Four 32-bit words (Salmon, Moraes, Dror, Shaw 2011)."""
    low = 0xFFFFFFFF
    c = [id & low, (id >> 32) & low, block, 0]
    k = [seed & low, (seed >> 32) & low]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & low, (p0 >> 32) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c


def random_words(seed: int, id: int, dim: int) -> list[int]:
    """One 32-bit word per column."""
    return [word for block in range(divide_up(dim, 4)) for word in philox(seed, id, block)][:dim]


def uniform_row(seed: int, id: int, dim: int, uniform: Uniform) -> np.ndarray:
    """float32 [dim], the initial row of an id; the same bits as the library's."""
    unit = np.array([word >> 8 for word in random_words(seed, id, dim)], np.float32)
    unit *= np.float32(2**-24)
    return np.float32(uniform.low) + unit * np.float32(uniform.high - uniform.low)


def initial_state(config: OptimizerConfig, dim: int) -> list[np.ndarray]:
    """The first state tensor starts with the initial accumulator, if there is one."""
    value = getattr(config, "initial_accumulator_value", 0.0)
    return [
        np.full(1 if tensor.per_row else dim, value if k == 0 else 0.0)
        for k, tensor in enumerate(config.state)
    ]


def prepared_gradient(config: OptimizerConfig, g: np.ndarray) -> np.ndarray:
    if config.clip_value is not None:
        g = np.clip(g, -config.clip_value, config.clip_value)
    norm = np.linalg.norm(g)
    if config.clip_norm is not None and norm > config.clip_norm:
        g = g * config.clip_norm / norm
    return g


def optimizer_step(
    config: OptimizerConfig, step: int, w: np.ndarray, g: np.ndarray, state: list[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Weight and state after one update in float64; ``step`` counts from 1."""
    g = prepared_gradient(config, -g if config.maximize else g)
    if not config.decoupled_weight_decay:
        g = g + config.weight_decay * w
    elif not isinstance(config, LAMB):
        w, decayed = w - rate_of(config, step) * config.weight_decay * w, w
        if isinstance(config, Ftrl):  # its weight does not depend on the one before
            moved, after = moved_weight(config, step, decayed, g, state)
            return moved * (1 - config.lr * config.weight_decay), after
        if isinstance(config, LARSSGD):
            moved, after = moved_weight(config, step, decayed, g, state)
            return w + (moved - decayed), after
    return moved_weight(config, step, w, g, state)


def rate_of(config: OptimizerConfig, step: int) -> float:
    decay = config.lr_decay if isinstance(config, Adagrad | RowWiseAdagrad) else 0.0
    return config.lr / (1 + (step - 1) * decay)


def moved_weight(
    config: OptimizerConfig, step: int, w: np.ndarray, g: np.ndarray, state: list[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Without weight decay but for what LAMB and LARS do with it."""
    lr = rate_of(config, step)
    if isinstance(config, SGD):
        return w - lr * g, []
    if isinstance(config, MomentumSGD):
        share = np.where(state[0] == 0, 1.0, 1.0 - config.dampening)
        velocity = config.momentum * state[0] + share * g
        ahead = g + config.momentum * velocity
        return w - lr * (ahead if config.nesterov else velocity), [velocity]
    if isinstance(config, LARSSGD):
        return lars_step(config, w, g, state)
    if isinstance(config, Adagrad | RowWiseAdagrad):
        square = g * g if isinstance(config, Adagrad) else np.mean(g * g, keepdims=True)
        total = state[0] + square
        return w - lr * g / (np.sqrt(total) + config.eps), [total]
    if isinstance(config, RMSprop | Adadelta | RowWiseRMSprop):
        return mean_square_step(config, step, w, g, state)
    if isinstance(config, Ftrl):
        return ftrl_step(config, w, g, state)
    assert isinstance(config, Adam)
    return adam_step(config, step, w, g, state)


def mean_square_step(
    config: RMSprop | Adadelta | RowWiseRMSprop,
    step: int,
    w: np.ndarray,
    g: np.ndarray,
    state: list[np.ndarray],
) -> tuple[np.ndarray, list[np.ndarray]]:
    if isinstance(config, RowWiseRMSprop):
        last = int(state[1][0])
        gone = 1 if last == 0 else step - last
        left = max(config.min_shrinkage, 1 - min(1, config.lr * config.ar_alpha * gone))
        v = config.ema_beta * state[0] + (1 - config.ema_beta) * np.mean(g * g, keepdims=True)
        return left * w - config.lr * g / (np.sqrt(v) + config.eps), [v, np.full(1, step)]
    if isinstance(config, Adadelta):
        v = config.rho * state[0] + (1 - config.rho) * g * g
        move = np.sqrt(state[1] + config.eps) / np.sqrt(v + config.eps) * g
        moves = config.rho * state[1] + (1 - config.rho) * move * move
        return w - config.lr * move, [v, moves]
    v = config.alpha * state[0] + (1 - config.alpha) * g * g
    move = g / (np.sqrt(v) + config.eps)
    if config.momentum == 0:
        return w - config.lr * move, [v]
    velocity = config.momentum * state[1] + move
    return w - config.lr * velocity, [v, velocity]


def lars_step(
    config: LARSSGD, w: np.ndarray, g: np.ndarray, state: list[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    decay = 0.0 if config.decoupled_weight_decay else config.weight_decay
    of_weight, of_gradient = np.linalg.norm(w), np.linalg.norm(g - decay * w)
    rate = config.lr
    if of_weight > 0 and of_gradient > 0:
        rate *= config.trust_coefficient * of_weight / (of_gradient + decay * of_weight)
    velocity = config.momentum * state[0] + rate * g
    return w - velocity, [velocity]


def ftrl_step(
    config: Ftrl, w: np.ndarray, g: np.ndarray, state: list[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    total = state[0] + g * g
    z = state[1] + g - (np.sqrt(total) - np.sqrt(state[0])) / config.lr * w
    u = np.where(np.abs(z) <= config.l1, 0.0, np.sign(z) * config.l1 - z)
    if isinstance(config, GroupFtrl):
        norm, least = np.linalg.norm(u), config.group_l1 * np.sqrt(len(w))
        u = u * 0.0 if norm <= least else (1 - least / norm) * u
    return u / ((config.beta + np.sqrt(total)) / config.lr + config.l2), [total, z]


def adam_step(
    config: Adam, step: int, w: np.ndarray, g: np.ndarray, state: list[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    beta1, beta2 = config.betas
    lr, steps = config.lr, []
    kept1, kept2, made_up = beta1, beta2, 0.0
    if isinstance(config, SmartDecayAdam):
        k = step - int(state[-1][0])
        kept1, kept2 = beta1**k, beta2**k
        made_up = sum(beta1**i for i in range(1, k)) * state[0]
        steps = [np.full(1, step)]
    elif config.row_steps:
        step = int(state[-1][0]) + 1
        steps = [np.full(1, step)]
    m = kept1 * state[0] + (1 - beta1) * g
    square = g * g if "exp_avg_sq" in config.element_state else np.mean(g * g, keepdims=True)
    v = kept2 * state[1] + (1 - beta2) * square
    if isinstance(config, AdamWTF):
        step_size = lr * np.sqrt(1 - beta2**step) / (1 - beta1**step)
        return w - step_size * m / (np.sqrt(v) + config.eps), [m, v, *steps]
    moments = [m, v]
    largest = v
    if isinstance(config, AMSGrad):
        largest = np.maximum(state[2], v)
        moments.append(largest)
    corrected_m = (m + made_up) / (1 - beta1**step)
    direction = corrected_m / (np.sqrt(largest / (1 - beta2**step)) + config.eps)
    if isinstance(config, LAMB):
        if config.decoupled_weight_decay:
            direction = direction + config.weight_decay * w
        of_weight, of_direction = np.linalg.norm(w), np.linalg.norm(direction)
        if of_weight > 0 and of_direction > 0:
            direction = direction * of_weight / of_direction
    return w - lr * direction, [*moments, *steps]


def buckets_for(ids: int) -> int:
    """The fewest buckets for this many ids at load 0.70, rounded as the library rounds."""
    return round_up_buckets(divide_up(divide_up(ids * 100, 70), BUCKET_WIDTH))


def round_up_buckets(buckets: int) -> int:
    unit = MIN_BUCKETS if buckets <= 64 else 64
    return max(MIN_BUCKETS, divide_up(buckets, unit) * unit)


def divide_up(a: int, b: int) -> int:
    return -(-a // b)


class Oracle:
    """Model of a TableGroup with ``Uniform`` tables; starts empty."""

    def __init__(self, group: TableGroup) -> None:
        self.config = group.config.optimizer
        self.tables = group.config.tables
        self.seeds = group.index.meta[:, 0].tolist()
        self.slab = [group.config.slab_of(t) for t in range(len(self.tables))]
        self.max_rows = [weight.shape[0] for weight in group.rows.weights]
        self.handles: list[dict[int, int]] = [{} for _ in self.tables]
        self.scores: list[dict[int, int]] = [{} for _ in self.tables]
        self.buckets = [MIN_BUCKETS] * len(self.tables)
        self.inserted = [0] * len(self.tables)
        self.erased = [0] * len(self.tables)
        self.steps = [0] * len(self.tables)
        self.next_row = [0] * len(group.config.slabs)
        self.free: list[list[int]] = [[] for _ in group.config.slabs]
        self.rows: dict[tuple[int, int], OwnedRow] = {}
        self.clock = 0

    def find(self, table: int, ids: Ids) -> list[int]:
        padding = self.tables[table].padding_idx
        return [-2 if id == padding else self.handles[table].get(id, -1) for id in ids]

    def find_or_insert(self, features: Sequence[tuple[int, Ids]]) -> list[int]:
        """One call over several (table, ids)."""
        new: dict[tuple[int, int], None] = {}  # in order of first occurrence
        for table, ids in features:
            for id, handle in zip(ids, self.find(table, ids), strict=True):
                if handle == -1:
                    new[table, id] = None
                elif handle >= 0:
                    self.scores[table][id] = self.clock
        for slab, free in enumerate(self.free):
            rows = sum(self.slab[table] == slab for table, _ in new)
            if self.next_row[slab] + rows - len(free) > self.max_rows[slab]:
                raise TableFullError
        for table, id in new:
            slab = self.slab[table]
            if self.free[slab]:
                handle = self.free[slab].pop()
            else:
                handle = self.next_row[slab] << 28 | 1
                self.next_row[slab] += 1
            self.handles[table][id] = handle
            self.scores[table][id] = self.clock
            self.inserted[table] += 1
        for table in {table for table, _ in new}:
            self.grow_if_full(table)
        return [handle for table, ids in features for handle in self.find(table, ids)]

    def erase(self, table: int, ids: Ids) -> int:
        present = [id for id in dict.fromkeys(ids) if id in self.handles[table]]
        for id in present:
            self.free[self.slab[table]].append(self.handles[table].pop(id) + 1)
            del self.scores[table][id]
        self.erased[table] += len(present)
        return len(present)

    def grow_if_full(self, table: int) -> None:
        """By 45 %, or as far as the ids need, but not past what is reserved."""
        ids, buckets = len(self.handles[table]), self.buckets[table]
        if ids > buckets * BUCKET_WIDTH * 70 // 100:
            slots = divide_up(self.max_rows[self.slab[table]] * 100, 70)
            reserved = max(MIN_BUCKETS, divide_up(slots, BUCKET_WIDTH * 64) * 64)
            usual = round_up_buckets(buckets + divide_up(buckets * 45, 100))
            self.buckets[table] = max(buckets_for(ids), min(usual, reserved))

    def grow(self, table: int, ids: int) -> None:
        self.buckets[table] = max(self.buckets[table], buckets_for(ids))

    def owned(self, table: int, id: int) -> OwnedRow:
        """The row of an id that is there, with its initial value until it has been trained."""
        handle, dim = self.handles[table][id], self.tables[table].embedding_dim
        row = self.rows.get((self.slab[table], handle >> 28))
        if row is not None and row.handle == handle:
            return row
        assert self.config is not None
        return OwnedRow(handle, self.initial(table, id), initial_state(self.config, dim))

    def initial(self, table: int, id: int) -> np.ndarray:
        config = self.tables[table]
        assert isinstance(config.initializer, Uniform)
        row = uniform_row(self.seeds[table], id, config.embedding_dim, config.initializer)
        return row.astype(np.float64)

    def read(self, table: int, id: int) -> np.ndarray:
        """float64 [dim], what a lookup gives."""
        if id in self.handles[table]:
            return self.owned(table, id).weight
        config = self.tables[table]
        if id == config.padding_idx or config.eval_default == "zeros":
            return np.zeros(config.embedding_dim)
        return self.initial(table, id)

    def update(self, gradients: dict[tuple[int, int], np.ndarray], tables: set[int]) -> None:
        """One backward: gradient sums by (table, id), and the tables that were looked up."""
        assert self.config is not None
        for table in tables:
            self.steps[table] += 1
        for (table, id), gradient in gradients.items():
            if id not in self.handles[table]:
                continue
            row = self.owned(table, id)
            weight, state = optimizer_step(
                self.config, self.steps[table], row.weight, gradient, row.state
            )
            self.rows[self.slab[table], row.handle >> 28] = OwnedRow(row.handle, weight, state)
