"""Where the embeddings of the 26 categorical features come from.

:class:`DynamicRows` has a row for every id it has met. :class:`HashedRows` shares a fixed number
of rows among all ids (the hashing trick, Weinberger et al. 2009, https://arxiv.org/abs/0902.2206).
Both map ids (26, B) to embeddings (B, 26, D), initialise rows uniformly in ``[-bound, bound]``
and are trained by row-wise Adagrad, unless dynamic tables are told otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.storage.tiers import StorageStats
from tutorials.dlrm.optimizers import RowOptions
from tutorials.dlrm.parsing import CATEGORY_COUNT
from tutorials.dlrm.rowwise_adagrad import SparseRowWiseAdagrad

FEATURE_NAMES = [f"category_{i}" for i in range(1, CATEGORY_COUNT + 1)]

ROW_BOUND = 0.01
"""Rows of the job start uniform in ``[-bound, bound]``."""

_FLOAT_BYTES = 4
_EPS = 1e-8
_DEFAULT_OPTIONS = RowOptions()


class Turnover(NamedTuple):
    """Ids that did not stay or did not get in, of all tables."""

    evicted: int
    """Had to go for others."""
    rejected: int
    """Found no room; counted once per step."""
    not_admitted: int
    """Were not let in; counted once per step."""


class Figures(NamedTuple):
    """What the job reports about its dynamic tables, all together."""

    ids: int
    table_bytes: int
    """Of memory: rows, optimizer state, index, scores, counts."""
    turnover: Turnover
    ids_by_feature: tuple[int, ...]
    evicted_by_feature: tuple[int, ...]
    storage: StorageStats | None = None
    """None: all rows are in memory."""


class DynamicRows(nn.Module):
    """One dynamic table per feature, all in one group; starts empty.

    Args:
        embedding_dim: Length of a row.
        lr: Learning rate of the rows.
        bound: Rows start uniform in ``[-bound, bound]``.
        policies: How ids come and go, by feature; None: they come, and stay.
        options: How rows are updated and kept.
        storage: Where rows lie that are not in memory; None: all are.
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        lr: float,
        bound: float,
        policies: Sequence[td.Policy] | None = None,
        options: RowOptions = _DEFAULT_OPTIONS,
        storage: td.SSDStore | None = None,
    ) -> None:
        super().__init__()
        initializer = td.Uniform(-bound, bound)
        self.embedding_dim = embedding_dim
        self.tables = td.DynamicEmbeddingBagCollection(
            [
                td.TableConfig(
                    name,
                    embedding_dim,
                    [name],
                    initializer=initializer,
                    policy=policy,
                    dtype=options.dtype,
                    storage=storage,
                )
                for name, policy in zip(
                    FEATURE_NAMES, policies or [td.Policy()] * CATEGORY_COUNT, strict=True
                )
            ],
            optimizer=options.config(lr),
            mode="sum",
            split=options.split,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids (26, B) int64 as embeddings (B, 26, D) float32."""
        embeddings: Tensor = self.tables(_features(ids))
        return embeddings.view(-1, CATEGORY_COUNT, self.embedding_dim)

    def prefetch(self, ids: Tensor) -> None:
        """Begin to bring the rows of the next step's ids (26, B) int64 into memory."""
        self.tables.prefetch(_features(ids))

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer; it moves rows during the backward, or, if split, in its step."""
        return self.tables.optimizer

    def sizes(self) -> list[int]:
        """Return the number of ids by feature."""
        return list(self.tables.sizes().values())

    def table_bytes(self) -> int:
        """Return the bytes of everything: rows, optimizer state, index, scores, counts."""
        return self.tables.memory()["total"]

    def figures(self) -> Figures:
        """Return what the job reports."""
        stats = self.tables.group.stats().values()
        sizes = tuple(table.size for table in stats)
        evicted = tuple(table.evicted for table in stats)
        turnover = Turnover(
            evicted=sum(evicted),
            rejected=sum(table.rejected for table in stats),
            not_admitted=sum(table.not_admitted for table in stats),
        )
        storage = self.tables.group.storage_stats()
        return Figures(sum(sizes), self.table_bytes(), turnover, sizes, evicted, storage)


class HashedRows(nn.Module):
    """One nn.EmbeddingBag per feature, indexed by a hash of the id.

    Args:
        rows: Number of rows by feature.
        embedding_dim: Length of a row.
        lr: Learning rate of the rows.
        bound: Rows start uniform in ``[-bound, bound]``.
    """

    row_counts: Tensor

    def __init__(self, rows: Sequence[int], embedding_dim: int, *, lr: float, bound: float) -> None:
        super().__init__()
        if len(rows) != CATEGORY_COUNT or min(rows) < 1:
            raise ValueError(
                f"rows must be {CATEGORY_COUNT} numbers of at least 1, got {list(rows)}"
            )
        self.lr = lr
        bags = [nn.EmbeddingBag(n, embedding_dim, mode="sum", sparse=True) for n in rows]
        for bag in bags:
            nn.init.uniform_(bag.weight, -bound, bound)
        self.bags = nn.ModuleList(bags)
        self.register_buffer("row_counts", torch.tensor(rows).unsqueeze(1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids (26, B) int64 as embeddings (B, 26, D) float32."""
        indices = torch.remainder(_hash(ids), self.row_counts).unsqueeze(-1)
        return torch.stack([bag(i) for bag, i in zip(self.bags, indices, strict=True)], dim=1)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer of the rows."""
        return SparseRowWiseAdagrad(self.parameters(), self.lr, eps=_EPS)


def split_rows(sizes: Sequence[int], table_bytes: int, embedding_dim: int) -> list[int]:
    """Divide memory among hashed tables, kindly.

    A fixed table is sized before training, when the number of ids to come is unknown. Here it is
    told the final number of ids of every feature, and rows are divided in proportion, except that
    features of few ids get more rows than ids: a tenth of all rows, divided equally, is a table's
    least. In plain proportion a handful of ids that occur in most samples would collide, and the
    hashed tables would do far worse.

    Args:
        sizes: Ids by feature.
        table_bytes: What rows and optimizer state (one float a row) may take altogether.
        embedding_dim: Length of a row.

    Returns:
        Rows by feature; altogether they take at most ``table_bytes``, unless that is less than a
        row per feature.
    """
    total = table_bytes // (_FLOAT_BYTES * (embedding_dim + 1))
    least = max(1, total // (10 * len(sizes)))
    large = [n if n > least else 0 for n in sizes]
    left = total - least * large.count(0)
    return [max(1, left * n // sum(large)) if n else least for n in large]


def _features(ids: Tensor) -> td.KeyedJagged:
    """A bag per feature and sample, each of one id."""
    offsets = torch.arange(ids.numel() + 1, device=ids.device)
    return td.KeyedJagged(FEATURE_NAMES, ids.reshape(-1), offsets)


def _hash(x: Tensor) -> Tensor:
    """SplitMix64's output function on int64."""
    for shift, multiplier in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ _shift_right(x, shift)) * multiplier
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift in zeros; ``>>`` on int64 repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
