"""Generated click sequences of a shop: users click what is near to their last clicks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LONGEST = 50
"""Clicks that a user's history keeps."""

_CATEGORIES = 20
_LATENT_DIM = 8
_ITEMS = 300  # on sale at a time
_NEW_ITEMS = 1  # of a step; as many leave
_USERS_PER_SAMPLE = 3  # active users, by the samples of a batch
_NEW_USERS = 0.03  # by the samples of a batch; as many leave
_FIRST_CLICKS = 3  # at most, of a new user
_HALF_LIFE = 20.0  # steps after which a click weighs one half
_LOGIT = (-3.0, 6.0)  # of a click: without and with an item of the same kind just before
_BIAS = 0.5  # standard deviation of what users and items have of their own
_ODD = np.uint64(0x9E3779B97F4A7C15)  # times a number: an id with no order, all 64 bits of it


class Batch(NamedTuple):
    """Batch of the samples of a step.

    Attributes:
        users: int64 [B], ids.
        candidates: int64 [B], ids of the items that are shown.
        history: int64 [N], ids of the items that each user has clicked, the latest first.
        offsets: int64 [B + 1], where the users' histories begin in it; 1 to LONGEST clicks each.
        recency: float32 [N], 1 for a click of just now, falling towards 0.
        labels: float32 [B], 1 for a click.
        chances: float32 [B], the planted probability of it.
    """

    users: Tensor
    candidates: Tensor
    history: Tensor
    offsets: Tensor
    recency: Tensor
    labels: Tensor
    chances: Tensor

    def part(self, number: int, parts: int) -> Batch:
        """Return the samples of one of several ranks, which have equally many."""
        size = len(self.labels) // parts
        mine = slice(number * size, (number + 1) * size)
        offsets = self.offsets[number * size : (number + 1) * size + 1]
        clicks = slice(int(offsets[0]), int(offsets[-1]))
        return Batch(
            users=self.users[mine],
            candidates=self.candidates[mine],
            history=self.history[clicks],
            offsets=offsets - offsets[0],
            recency=self.recency[clicks],
            labels=self.labels[mine],
            chances=self.chances[mine],
        )


class ClickStream:
    """Batches in the order of time; the same ones for the same seed and batch size.

    Items have a category and lie near its vector. A sample shows an item to a user: one like a
    recent click, or any. The closer it is to one of the recent clicks, the likelier is a click,
    which then is part of the user's history. Users and items come and go all the time.

    Args:
        seed: Of everything.
        batch_size: Samples of a batch, all of different users.
    """

    def __init__(self, seed: int, batch_size: int) -> None:
        self._random = np.random.default_rng(seed)
        self._batch_size = batch_size
        self._step = 0
        centers = self._random.normal(size=(_CATEGORIES, _LATENT_DIM))
        self._centers = centers / np.linalg.norm(centers, axis=1, keepdims=True)
        self._category = np.empty(0, np.int64)  # by number of the item, as the next two
        self._latent = np.empty((0, _LATENT_DIM))
        self._item_bias = np.empty(0)
        self._add_items(_ITEMS)
        active = _USERS_PER_SAMPLE * batch_size
        self._users = np.zeros(active, np.int64)
        self._user_bias = np.zeros(active)
        self._clicks = np.zeros((active, LONGEST), np.int64)  # the latest first
        self._clicked_at = np.zeros((active, LONGEST), np.int64)
        self._lengths = np.zeros(active, np.int64)
        self._known_users = 0
        self._add_users(np.arange(active))

    def next_batch(self) -> Batch:
        """Return the samples of the next step."""
        self._step += 1
        self._add_items(_NEW_ITEMS)
        leaving = max(1, round(_NEW_USERS * self._batch_size))
        self._add_users(self._random.choice(len(self._users), leaving, replace=False))
        users = self._random.choice(len(self._users), self._batch_size, replace=False)
        candidates = self._shown(users)
        there = np.arange(LONGEST) < self._lengths[users][:, None]
        recency = 0.5 ** ((self._step - self._clicked_at[users]) / _HALF_LIFE)
        near = np.einsum(
            "bld,bd->bl", self._latent[self._clicks[users]], self._latent[candidates]
        ).clip(0)
        nearest = (near * recency * there).max(1)
        logits = _LOGIT[0] + _LOGIT[1] * nearest
        logits += self._user_bias[users] + self._item_bias[candidates]
        chances = 1 / (1 + np.exp(-logits))
        labels = self._random.random(self._batch_size) < chances
        batch = Batch(
            users=_ids(self._users[users]),
            candidates=_ids(candidates),
            history=_ids(self._clicks[users][there]),
            offsets=torch.from_numpy(np.cumsum([0, *self._lengths[users]])),
            recency=torch.from_numpy(recency[there].astype(np.float32)),
            labels=torch.from_numpy(labels.astype(np.float32)),
            chances=torch.from_numpy(chances.astype(np.float32)),
        )
        self._click(users[labels], candidates[labels])
        return batch

    def _add_items(self, count: int) -> None:
        """Return new items; those on sale are the last of all."""
        category = self._random.integers(_CATEGORIES, size=count)
        latent = self._centers[category] + 0.1 * self._random.normal(size=(count, _LATENT_DIM))
        latent /= np.linalg.norm(latent, axis=1, keepdims=True)
        self._category = np.concatenate([self._category, category])
        self._latent = np.concatenate([self._latent, latent])
        bias = self._random.normal(scale=_BIAS, size=count)
        self._item_bias = np.concatenate([self._item_bias, bias])
        self._first = len(self._category) - _ITEMS  # that is still on sale
        on_sale = self._category[self._first :]
        self._by_category = self._first + np.argsort(on_sale, kind="stable")
        self._begins = np.searchsorted(np.sort(on_sale), np.arange(_CATEGORIES + 1))

    def _add_users(self, places: np.ndarray) -> None:
        """Put new users, with a few clicks on any items, in the place of others."""
        self._users[places] = self._known_users + np.arange(len(places))
        self._known_users += len(places)
        self._user_bias[places] = self._random.normal(scale=_BIAS, size=len(places))
        self._lengths[places] = 0
        first_clicks = self._random.integers(1, _FIRST_CLICKS + 1, size=len(places))
        for number in range(_FIRST_CLICKS):
            clicking = places[first_clicks > number]
            any_item = self._first + self._random.integers(_ITEMS, size=len(clicking))
            self._click(clicking, any_item)

    def _shown(self, users: np.ndarray) -> np.ndarray:
        """Return items: for half of the users of the kind of one of their last 5 clicks."""
        count = len(users)
        position = self._random.integers(np.minimum(self._lengths[users], 5))
        kind = self._category[self._clicks[users, position]]
        size = self._begins[kind + 1] - self._begins[kind]
        alike = self._begins[kind] + (self._random.random(count) * size).astype(np.int64)
        any_item = self._random.integers(_ITEMS, size=count)
        recommended = (self._random.random(count) < 0.5) & (size > 0)
        return self._by_category[np.where(recommended, alike, any_item)]

    def _click(self, users: np.ndarray, items: np.ndarray) -> None:
        for kept, now in ((self._clicks, items), (self._clicked_at, self._step)):
            kept[users, 1:] = kept[users, :-1]
            kept[users, 0] = now
        self._lengths[users] = np.minimum(self._lengths[users] + 1, LONGEST)


def _ids(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy((numbers.astype(np.uint64) * _ODD).view(np.int64))
