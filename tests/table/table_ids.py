"""Which ids a table has."""

from __future__ import annotations

import torch_dynemb as td


def ids_of(group: td.TableGroup, table: int = 0) -> set[int]:
    return {int(id) for batch in group.export(table) for id in batch.ids}
