"""Results of loading crafted checkpoints, which no save has written."""

from __future__ import annotations

from pathlib import Path

from whole_group import check_whole
from whole_model import make, same, whole_state

from torch_dynemb import checkpoint


def outcome(path: Path, kind: str, what: str) -> str:
    """The error of a load, after which nothing has changed; empty: a sound model was loaded."""
    model = make(kind)
    before = whole_state(model)
    told = ""
    try:
        checkpoint.load(path, model)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        told = str(error)
    if told:
        assert same(whole_state(model), before), f"{kind}, {what}: {told}"
        return told
    for group in (model.tables.group, model.bag.group):
        group.materialize()
        check_whole(group)
    model.train_steps(range(30, 32))
    return ""
