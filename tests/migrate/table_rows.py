"""What a table holds after a migration, and whether it is what was in the files."""

from __future__ import annotations

import torch
from foreign_files import Rows
from torch import nn

from torch_dynemb.parts.table_parts import parts_of
from torch_dynemb.table.content import read_content


def assert_holds(
    model: nn.Module,
    rows: Rows,
    *,
    table: str = "embedding",
    state: bool = True,
    scores: tuple[str, ...] = (),
) -> None:
    """The ids of a table, and its rows, state and scores to the last bit."""
    (part,) = (part for part in parts_of(model) if part.name == table)
    content = read_content(part.group.tables, part.table)
    order = torch.from_numpy(rows.ids).argsort()
    assert torch.equal(content.ids.cpu(), torch.from_numpy(rows.ids)[order])
    assert torch.equal(content.rows.cpu(), torch.from_numpy(rows.values)[order])
    assert not state or content.state.keys() == rows.state.keys()
    for name in rows.state if state else ():
        assert torch.equal(content.state[name].cpu(), torch.from_numpy(rows.state[name])[order])
    for name in scores:
        kept = content.scores[name].cpu()
        assert torch.equal(kept, torch.from_numpy(rows.scores[name])[order])
