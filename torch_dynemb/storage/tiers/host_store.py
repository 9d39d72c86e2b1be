"""Config of rows that exceed the memory of a GPU and lie in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_dynemb.policy.admission import parse_bytes

# Tensors with fewer bytes a row stay in HBM (kLeastSplitBytes in csrc).
LEAST_SPLIT_BYTES = 16


@dataclass(frozen=True)
class HostStore:
    """Rows in host memory that the GPU maps, beyond a budget of GPU memory (HBM).

    Row numbers are addresses: the first rows that a table gets lie in HBM until ``hbm`` is used,
    later ones in pinned host memory. Kernels read and write both at the same addresses, so results
    have the bits of tables in HBM alone. Frequent ids mostly come first and lie in HBM. A row never
    moves.

    The index, generations and optimizer state below 16 bytes a row stay in HBM. So do rows of less
    than 16 bytes, and the first 2 MiB of each tensor. On the CPU all rows are in memory, and
    ``hbm`` and ``host`` have no effect.

    Budgets are for one table group on one GPU: each rank has its own. Tables of a group with a
    ``HostStore`` share it.

    Args:
        hbm: bytes of HBM for weights and optimizer state, a number or a text such as ``"40GB"``;
            0, the default: all of them are in host memory.
        host: bytes of host memory, at most; None: what the machine, or its control group, has.

    Raises:
        TypeError, ValueError: a wrong value.

    Example:
        >>> import torch_dynemb as td
        >>> table = td.TableConfig("user", 64, storage=td.HostStore(hbm="40GB"))
    """

    hbm: int | str = 0
    host: int | str | None = None
    hbm_bytes: int = field(init=False, repr=False, compare=False)
    host_bytes: int | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        none = not isinstance(self.hbm, bool) and self.hbm == 0
        hbm = 0 if none else parse_bytes("HostStore: hbm", self.hbm)
        host = None if self.host is None else parse_bytes("HostStore: host", self.host)
        object.__setattr__(self, "hbm_bytes", hbm)
        object.__setattr__(self, "host_bytes", host)


__all__ = ["LEAST_SPLIT_BYTES", "HostStore"]
