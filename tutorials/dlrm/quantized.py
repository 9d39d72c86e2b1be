"""The AUC of a trained model whose rows are quantized, as it would be served."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch_dynemb as td
from torch_dynemb.serving.row_formats import RowKind
from tutorials.dlrm.criteo import Position
from tutorials.dlrm.data import Data, make_reader
from tutorials.dlrm.loop import Pass
from tutorials.dlrm.model import DLRM
from tutorials.dlrm.options import Options

UNCHANGED = "unchanged"


class Served(NamedTuple):
    """A frozen model."""

    auc: float | None
    """On the held-out samples; None if one of the labels does not occur."""
    row_bytes: float
    """Of the rows, an id: what there is room for that no id has counts, too."""
    bytes_per_id: float
    """Of all that the frozen tables have: rows, index, generations."""


def kinds_of_rows(opts: Options) -> list[tuple[str, RowKind | None]]:
    """Return names and kinds of rows that the model is frozen with.

    Args:
        opts: Of the job.

    Returns:
        ``"unchanged"``, rows as they are, and those of --quantize.
    """
    return [(UNCHANGED, None), *((kind, kind) for kind in opts.quantize)]


def evaluate_frozen(opts: Options, data: Data, frozen: DLRM, position: Position) -> Served:
    """Compute the AUC of a frozen model, and the size of its tables.

    Args:
        opts: Of the job.
        data: Of the job.
        frozen: With read-only tables.
        position: Where the held-out samples begin.
    """
    held_out = make_reader(opts, data, position, data.lines)
    auc = Pass(frozen, [], log_every=opts.log_every).evaluate(held_out)
    tables = [part for part in frozen.modules() if isinstance(part, td.serving.FrozenTables)]
    ids = sum(sum(part.sizes().values()) for part in tables)
    buffers = {name: buffer for part in tables for name, buffer in part.named_buffers()}
    sizes = {name: buffer.numel() * buffer.element_size() for name, buffer in buffers.items()}
    rows = sum(size for name, size in sizes.items() if name.startswith("weights"))
    return Served(
        None if math.isnan(auc) else auc,
        round(rows / max(ids, 1), 2),
        round(sum(sizes.values()) / max(ids, 1), 2),
    )
