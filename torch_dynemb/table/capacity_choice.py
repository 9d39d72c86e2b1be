"""Choice of the ids that stay where more are loaded than a table has room for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torch_dynemb.table.tables import Tables


def ids_with_room(
    tables: Tables, table: int, ids: Tensor, scores: Mapping[str, Tensor], beginning: str
) -> Tensor | None:
    """Choose the ids with the highest scores, as the policy of the table would evict the others.

    Among equal scores, larger ids stay, as in an eviction.

    Args:
        tables: of the group.
        table: its number.
        ids: int64 [n], without duplicates.
        scores: int64 [n] by name, those that are loaded.
        beginning: of the error's message.

    Returns:
        bool [n], ids that stay; None: all of them.

    Raises:
        ValueError: there is too little room, and no score to choose by.
    """
    bound, count = tables.config.capacity_bound(table), ids.numel()
    if bound is None or count <= bound:
        return None
    policy = tables.config.tables[table].policy
    deciding = policy.scores[0]
    refuses = policy.full(budget=tables.config.memory_budget is not None) in ("error", "default")
    if deciding not in scores or refuses:
        raise ValueError(
            f"{beginning} {count} ids for this part, but has room for {bound} and no score to "
            "choose by: give it a larger capacity"
        )
    order = torch.argsort(ids)
    order = order[torch.argsort(scores[deciding][order], stable=True)]
    kept = torch.zeros(count, dtype=torch.bool, device=ids.device)
    kept[order[count - bound :]] = True
    return kept


__all__ = ["ids_with_room"]
