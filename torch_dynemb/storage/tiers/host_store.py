"""Config of rows that exceed the memory of a GPU and lie in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_dynemb.policy.admission import parse_bytes
from torch_dynemb.storage.tiers.cache_size import CacheSize, parse_cache

# Tensors with fewer bytes a row stay in HBM (kLeastSplitBytes in csrc).
LEAST_SPLIT_BYTES = 16


@dataclass(frozen=True)
class HostStore:
    """Rows in host memory that the GPU maps, beyond a budget of GPU memory (HBM).

    There are two ways to use the HBM; results of both have the bits of tables in HBM alone.

    * ``hbm``: the first rows that a table gets lie in HBM, later ones in pinned host memory.
      Kernels read and write both at their addresses. A row never moves. Frequent ids mostly come
      first.
    * ``cache``: all rows lie in pinned host memory, and HBM caches some of them. A training step
      copies missing rows into the cache and changed rows back. The cache keeps the rows that are
      used most often; counts are halved from time to time. Rows without a slot in the cache are
      read and written in host memory, so a small cache is slow but never fails.

    The index, generations and optimizer state below 16 bytes a row stay in HBM. So do rows of less
    than 16 bytes, and the first 2 MiB of each tensor. On the CPU all rows are in memory, and
    ``hbm``, ``cache`` and ``host`` have no effect.

    Budgets are for one table group on one GPU: each rank has its own. Tables of a group with a
    ``HostStore`` share it.

    Args:
        hbm: bytes of HBM for weights and optimizer state, a number or a text such as ``"40GB"``;
            0, the default: all of them are in host memory.
        host: bytes of host memory, at most; None: what the machine, or its control group, has.
        cache: rows in the cache: bytes of HBM (an int, or a text such as ``"40GB"``),
            ``"1000000 rows"``, or a fraction of the current rows (0.1, or ``"10%"``). Tables of
            several dims divide bytes and rows in proportion to the rows that they may have.
            Default: no cache.

    Raises:
        TypeError, ValueError: a wrong value, or both ``hbm`` and ``cache``.

    Example:
        >>> import torch_dynemb as td
        >>> table = td.TableConfig("user", 64, storage=td.HostStore(hbm="40GB"))
        >>> table = td.TableConfig("user", 64, storage=td.HostStore(cache=0.1))
    """

    hbm: int | str = 0
    host: int | str | None = None
    cache: int | float | str | None = None
    hbm_bytes: int = field(init=False, repr=False, compare=False)
    host_bytes: int | None = field(init=False, repr=False, compare=False)
    cache_size: CacheSize | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        none = not isinstance(self.hbm, bool) and self.hbm == 0
        hbm = 0 if none else parse_bytes("HostStore: hbm", self.hbm)
        host = None if self.host is None else parse_bytes("HostStore: host", self.host)
        object.__setattr__(self, "hbm_bytes", hbm)
        object.__setattr__(self, "host_bytes", host)
        size = None if self.cache is None else parse_cache("HostStore: cache", self.cache)
        object.__setattr__(self, "cache_size", size)
        if hbm > 0 and size is not None:
            raise ValueError(
                f"HostStore: hbm is {self.hbm!r} and cache is {self.cache!r}, but HBM either has "
                "rows of its own or caches those of host memory: give one of them"
            )

    def slots(self, rows: int, slot_bytes: int, share: float) -> int:
        """Return the most slots that the cache of a slab may have.

        Args:
            rows: that the slab may have.
            slot_bytes: memory of a slot with its row.
            share: of the slab in the cache, from 0 to 1.

        Raises:
            ValueError: no row fits into the cache.
        """
        size = self.cache_size
        assert size is not None
        given = f"HostStore has cache={self.cache!r}"
        return size.most_slots(given, rows, slot_bytes, share)


__all__ = ["LEAST_SPLIT_BYTES", "HostStore"]
