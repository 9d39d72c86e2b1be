"""What the job prints at its end."""

from __future__ import annotations

import math
from typing import Any

from tutorials.dlrm import files_of_rows
from tutorials.dlrm.data import Data
from tutorials.dlrm.loop import Pass
from tutorials.dlrm.options import Options
from tutorials.dlrm.rows import Figures


def summarize(
    opts: Options,
    data: Data,
    progress: Pass,
    auc: float,
    baseline_auc: float | None,
    figures: Figures,
) -> dict[str, Any]:
    """Return the JSON object; see ``--help``.

    Args:
        progress: Of the model with dynamic tables.
        auc: On the held-out lines; NaN if one of the labels does not occur.
        baseline_auc: The same of hashed tables; None: there were none.
        figures: Of all dynamic tables, on all ranks.
    """
    return {
        "auc": _number(auc),
        "best_auc": data.best_auc,
        "baseline_auc": None if baseline_auc is None else _number(baseline_auc),
        "samples": progress.samples,
        "samples_per_s": round(progress.samples / progress.seconds, 1),
        "ids": figures.ids,
        "table_bytes": figures.table_bytes,
        "optimizer": opts.optimizer,
        "row_dtype": opts.row_dtype,
        "state_dtype": opts.state_dtype,
        "rounding": opts.rounding,
        "accumulate": opts.accumulate,
        "capacity": opts.capacity,
        "eviction": opts.eviction,
        "admission": opts.admission,
        **figures.turnover._asdict(),
        "device": opts.device,
        "compiled": opts.compile,
        "storage": None
        if figures.storage is None
        else files_of_rows.summary(opts, figures.storage, progress),
    }


def _number(auc: float) -> float | None:
    """Return what JSON can hold: there is no AUC if one of the labels does not occur."""
    return None if math.isnan(auc) else auc
