"""The AUC of a trained model whose rows are quantized, as it would be served."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch_dynemb as td
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


def evaluate_quantized(
    opts: Options, data: Data, model: DLRM, position: Position
) -> dict[str, Served]:
    """Freeze a model with rows as they are and with each kind of --quantize, and evaluate that.

    Args:
        opts: Of the job.
        data: Of the job.
        model: With dynamic tables, trained.
        position: Where the held-out samples begin.

    Returns:
        By kind of rows; ``"unchanged"`` is the first one.
    """
    return {
        kind: _evaluate(opts, data, td.freeze(model, rows=rows), position)
        for kind, rows in [(UNCHANGED, None), *((kind, kind) for kind in opts.quantize)]
    }


def _evaluate(opts: Options, data: Data, frozen: DLRM, position: Position) -> Served:
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
