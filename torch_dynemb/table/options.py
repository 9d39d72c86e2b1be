"""Options of a group of tables."""

from __future__ import annotations

from typing import Annotated

import torch
from typing_extensions import TypedDict


class GroupOptions(TypedDict, total=False):
    """Options of a group: how much its tables may hold, where, and when gradients are applied.

    Attributes:
        max_rows: int, 1 to 2^35 - 1; rows to reserve for the tables of one dim and dtype. Default:
            the sum of their capacities, or what would fill the device's memory. It is less where
            hundreds of groups share the addresses of the process. RuntimeError: too few addresses.
        memory_budget: bytes that the tables may take together, index and optimizer state included:
            int, or a text such as ``"4GB"``. First come, first served; each table keeps at least
            1/16 of an equal share, and tables that need more than is left get equal parts. Then
            ids are evicted, or what the policy of a table says. Exact counts of admission come on
            top, sketches do not. Default: capacities of policies are the only bounds.
        split: bool; True: backward only gathers gradients, and ``optimizer.step()`` applies them:
            for gradient accumulation, one norm of all gradients, ``GradScaler``, and several
            lookups in one forward; see :class:`torch_dynemb.SplitOptimizer`. Default: backward
            updates the rows.
        device: of all tensors: the CPU or a CUDA device; default: torch's default device.
            RuntimeError: tables cannot lie there.
    """

    max_rows: Annotated[int | None, None]
    memory_budget: Annotated[int | str | None, None]
    split: Annotated[bool, False]
    device: Annotated[torch.device | str | None, None]


__all__ = ["GroupOptions"]
