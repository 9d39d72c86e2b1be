"""The seed and the time that tables begin with: those of the group's first rank."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_dynemb.distributed.ranks import default_group, from_first_rank


class CommonStart(NamedTuple):
    """Seed and time of new tables, equal on all ranks of a group.

    Attributes:
        seed: of initial values.
        now: seconds since 1970.
    """

    seed: int
    now: int


def common_seed() -> int:
    """Return ``torch.initial_seed()`` of rank 0, so that initial rows are equal on all ranks.

    Collective if a default process group exists.
    """
    return _of_first_rank(torch.initial_seed())


def drawn_seed(process_group: dist.ProcessGroup | None = None) -> int:
    """Draw a number from torch's generator of the CPU; that of the first rank counts.

    Collective where there is a group.

    Args:
        process_group: None: the default one, if there is one.
    """
    drawn = torch.randint((1 << 63) - 1, (), dtype=torch.int64, device="cpu")
    if process_group is None:
        return _of_first_rank(int(drawn))
    return from_first_rank(int(drawn), process_group)


def _of_first_rank(seed: int) -> int:
    everyone = default_group()
    return seed if everyone is None else from_first_rank(seed, everyone)


def common_start(
    process_group: dist.ProcessGroup | None,
    *,
    own_seed: int | None = None,
    device: torch.device | None = None,
) -> CommonStart:
    """Return the seed and the clock of the group's first rank.

    Collective; without a group, or in a group of one, nothing is sent.

    Args:
        process_group: None: this process is alone.
        own_seed: the seed of this rank; default: ``torch.initial_seed()``.
        device: to send from; default: torch's choice for the group.
    """
    start = CommonStart(torch.initial_seed() if own_seed is None else own_seed, int(time.time()))
    if process_group is None or process_group.size() == 1:
        return start
    return from_first_rank(start, process_group, device=device)


__all__ = ["CommonStart", "common_seed", "common_start", "drawn_seed"]
