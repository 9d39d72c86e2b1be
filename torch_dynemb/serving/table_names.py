"""Names of the tables of frozen models in logs and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from torch_dynemb.parts.table_parts import table_name


def names_in_log(owner: str, name: str, *, alone: bool) -> Iterator[str]:
    """Return possible names of a frozen model's table in logs and checkpoints, likeliest first.

    Args:
        owner: path of the module that names the table.
        name: of the table in that module.
        alone: whether the module has no other table.
    """
    if alone:  # a DynamicEmbedding: its table is named after the module
        yield owner or "embedding"
    yield table_name(owner, name)
    while owner:  # enclosing modules, which the trained model lacks
        owner = owner.rpartition(".")[0]
        yield table_name(owner, name)


__all__ = ["names_in_log"]
