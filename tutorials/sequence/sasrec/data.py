"""Generated histories like those of MovieLens: each user rates an item at most once.

Items come out over time. What a user rates next depends on the last item, on the user's genres and
on popularity. The planted probabilities give the best ranking that there is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PADDING = 0  # no item has this id
PLACES = 10  # of a ranking
_GENRES, _FOLLOWERS = 20, 4
_SHARES = (0.55, 0.35, 0.10)  # of followers of the last item, the user's genres, and all items
_LATER = 0.3  # share of the items that come out over time


class Ratings(NamedTuple):
    """Ratings of users in the order of time.

    Attributes:
        ids: int64 [users, steps], items; PADDING after a user's last one.
        times: float32 [users, steps], 0 to 1.
        best: int64 [users, steps, PLACES], the likeliest items of each step, in order.
    """

    ids: Tensor
    times: Tensor
    best: Tensor


class Split(NamedTuple):
    """Histories before a time, and the next rating of each user with one.

    Attributes:
        histories: int64 [users, steps], ratings before the time; PADDING after them.
        known: int64 [m, steps], the same for users with a later rating.
        wanted: int64 [m], their next item.
        best: int64 [m, PLACES], the likeliest next items.
    """

    histories: Tensor
    known: Tensor
    wanted: Tensor
    best: Tensor


def generate(users: int, items: int, steps: int, seed: int = 0) -> Ratings:
    """Return ratings, the same for the same arguments.

    Args:
        users, items: how many there are.
        steps: ratings of a user, at most; at least a quarter of them.
        seed: of everything.
    """
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 1 << 62, (items,), generator=draw)
    popularity = 1.0 / torch.arange(1, items + 1).float()[torch.randperm(items, generator=draw)]
    popularity = popularity**0.8
    genre = torch.randint(_GENRES, (items,), generator=draw)
    released = torch.rand(items, generator=draw) * (torch.rand(items, generator=draw) < _LATER)
    tastes = (2.5 * torch.randn(users, _GENRES, generator=draw)).softmax(1)
    by_genre = popularity * (genre == torch.arange(_GENRES)[:, None])  # [genres, items]
    liked = tastes @ (by_genre / by_genre.sum(1, keepdim=True).clamp(min=1e-9))
    followers = _followers(genre, popularity, draw)
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1])
    anything = popularity / popularity.sum()

    begins = torch.rand(users, generator=draw) * 0.9
    counts = torch.randint(steps // 4, steps + 1, (users,), generator=draw)
    gaps = torch.rand(users, steps, generator=draw) * 0.6 / steps
    times = begins[:, None] + gaps.cumsum(1)
    numbers = torch.zeros(users, steps, dtype=torch.int64)
    best = torch.zeros(users, steps, PLACES, dtype=torch.int64)
    rated = torch.zeros(users, items, dtype=torch.bool)
    everyone = torch.arange(users)
    for step in range(steps):
        chances = _SHARES[1] * liked + _SHARES[2] * anything
        if step > 0:
            chances.scatter_add_(
                1, followers[numbers[:, step - 1]], (_SHARES[0] * shares).expand(users, -1)
            )
        chances.masked_fill_(rated | (released > times[:, step, None]), 0.0)
        numbers[:, step] = torch.multinomial(chances, 1, generator=draw)[:, 0]
        best[:, step] = chances.topk(PLACES).indices
        rated[everyone, numbers[:, step]] = True
    rating = (torch.arange(steps) < counts[:, None]) & (times <= 1.0)
    return Ratings(ids[numbers].where(rating, PADDING), times.where(rating, torch.inf), ids[best])


def _followers(genre: Tensor, popularity: Tensor, draw: torch.Generator) -> Tensor:
    """Return items of the same genre that are rated after each item, int64 [items, _FOLLOWERS]."""
    alike = popularity.sqrt() * (genre[:, None] == genre[None, :])
    alike.fill_diagonal_(0.0)
    return torch.multinomial(alike + 1e-9, _FOLLOWERS, generator=draw)


def split_at(ratings: Ratings, time: float) -> Split:
    """Split ratings at a time.

    Args:
        ratings: of all users.
        time: 0 to 1.
    """
    before = ratings.times < time
    histories = ratings.ids.where(before, PADDING)
    counts = before.sum(1)
    later = torch.isfinite(ratings.times).sum(1) > counts
    users = (later & (counts > 0)).nonzero()[:, 0]
    place = counts[users]
    return Split(
        histories[(counts > 1).nonzero()[:, 0]],
        histories[users],
        ratings.ids[users, place],
        ratings.best[users, place],
    )
