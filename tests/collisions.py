"""Ids that meet in the buckets of a table, from the inverse of its hash."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_dynemb import TableGroup
from torch_dynemb.ops.columns import Meta

MASK = (1 << 64) - 1
MULTIPLIERS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)


def fmix64(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's 64-bit finaliser; uint64."""
    x = x ^ (x >> np.uint64(33))
    for multiplier in MULTIPLIERS:
        x = x * np.uint64(multiplier)
        x = x ^ (x >> np.uint64(33))
    return x


def inverse_fmix64(x: np.ndarray) -> np.ndarray:
    """Invert fmix64: its argument for ``x``; the shift by 33 undoes itself."""
    x = x ^ (x >> np.uint64(33))
    for multiplier in reversed(MULTIPLIERS):
        x = x * np.uint64(pow(multiplier, -1, 1 << 64))
        x = x ^ (x >> np.uint64(33))
    return x


def second_hash(first: np.ndarray) -> np.ndarray:
    return fmix64(first + np.uint64(0x9E3779B97F4A7C15))


def bucket_of(hashes: np.ndarray, bucket_count: int) -> np.ndarray:
    """High 64 bits of hash * bucket_count, for bucket counts below 2^32."""
    high, low = hashes >> np.uint64(32), hashes & np.uint64(0xFFFFFFFF)
    count = np.uint64(bucket_count)
    return ((high * count + ((low * count) >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)


def table_salt(group: TableGroup, table: int) -> np.ndarray:
    seed = int(group.index.meta[table, Meta.SEED]) & MASK
    return fmix64(np.array([seed ^ 0x6A09E667F3BCC909], np.uint64))


def first_hashes(group: TableGroup, table: int, ids: Tensor) -> np.ndarray:
    return fmix64(ids.cpu().numpy().view(np.uint64) ^ table_salt(group, table))


def ids_of_hashes(group: TableGroup, table: int, hashes: np.ndarray) -> Tensor:
    """int64 ids with these first hashes."""
    ids = inverse_fmix64(hashes.astype(np.uint64)) ^ table_salt(group, table)
    return torch.tensor(ids.view(np.int64), device=group.device)


def ids_in_first_buckets(
    group: TableGroup, table: int, count: int, *, buckets: int, bucket_count: int
) -> Tensor:
    """Distinct ids with first candidates among the first ``buckets`` of ``bucket_count`` buckets.

    With ``buckets`` 1 that holds for every smaller bucket count, too.
    """
    stride = (buckets << 64) // bucket_count // count
    return ids_of_hashes(group, table, np.arange(count, dtype=np.uint64) * np.uint64(stride))


def ids_in_one_bucket(group: TableGroup, table: int, count: int, *, bucket_count: int) -> Tensor:
    """Distinct ids with both candidates in bucket 0, at this bucket count and at smaller ones."""
    limit = (1 << 64) // bucket_count
    tries = 2 * count * bucket_count + 1000
    first = np.arange(tries, dtype=np.uint64) * np.uint64(limit // tries)
    chosen = first[second_hash(first) < np.uint64(limit)][:count]
    assert len(chosen) == count
    return ids_of_hashes(group, table, chosen)
