"""DynamicEmb's incremental dump, which a delta log takes the place of."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn


def incremental_dump(model: nn.Module, score_threshold: Any, pg: Any = None) -> NoReturn:
    """Raises an error: changes are published by a delta log, which misses none.

    DynamicEmb's function gives the ids whose score has reached a threshold. That leaves out ids
    that are gone, and which ids have changed where scores do not say it.

    Args:
        model: with tables.
        score_threshold: of the ids that are wanted, or by table.
        pg: of the ranks that share the model.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"incremental_dump: score_threshold={score_threshold!r} is not taken: publish what changes "
        "with torch_dynemb.checkpoint.DeltaLog(directory).attach(model), which also has ids that "
        "are gone, and let servers follow it (torch_dynemb.checkpoint.follow); or write an "
        "increment with torch_dynemb.checkpoint.save(path, model, since=parent); or read ids by "
        "their score with group.export(table, since=score_threshold)"
    )


__all__ = ["incremental_dump"]
