"""The trained model as it serves: with quantized rows (--quantize), as packages (--export)."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import Dim

import torch_dynemb as td
from torch_dynemb.serving.row_formats import RowKind
from tutorials.dlrm.data import CATEGORY_COUNT, CriteoReader
from tutorials.dlrm.loop import Pass, tensors
from tutorials.dlrm.model import DENSE_COUNT

TOLERANCE = 1e-4
"""Between log-odds of compiled and of eager code, which add up in other orders."""


class Served(NamedTuple):
    """A frozen model."""

    auc: float | None
    """On the held-out samples; None if one of the labels does not occur."""
    row_bytes: float
    """Of the rows, by id; spare room counts, too."""
    bytes_per_id: float
    """Of all that the frozen tables have: rows, index, generations."""


class Exported(NamedTuple):
    """A package that has been written, loaded and compared."""

    path: str
    bytes: int
    """Of all its files."""
    samples: int
    """The held-out ones, on which it was compared."""
    largest_difference: float
    """Between its log-odds and those of the frozen model."""


def kinds_of_rows(opts: Namespace) -> list[tuple[str, RowKind | None]]:
    """Return names and kinds of rows to freeze with: as they are, and those of --quantize."""
    return [("unchanged", None), *((kind, kind) for kind in opts.quantize)]


def check_places(opts: Namespace) -> None:
    """Raise ValueError if a folder of --export exists, before anything is trained."""
    for kind, _ in kinds_of_rows(opts):
        if opts.export is not None and (opts.export / kind).exists():
            raise ValueError(
                f"--export {opts.export}: {opts.export / kind} is there: choose another folder, or "
                "remove it"
            )


def freeze(
    opts: Namespace, model: nn.Module, version: int, held_out: Callable[[], CriteoReader]
) -> dict[str, Any]:
    """Freeze a model with each kind of rows, evaluate and export it.

    Args:
        opts: Of the job.
        model: That has been trained.
        version: Of the packages: the steps of training.
        held_out: Makes a reader of the held-out samples.

    Returns:
        What the program adds to the result that it prints; see ``--help``.
    """
    result: dict[str, Any] = {}
    for kind, rows in kinds_of_rows(opts) if opts.quantize or opts.export else []:
        frozen = td.freeze(model, rows=rows)
        if opts.quantize:
            served = evaluate_frozen(frozen, held_out())
            result.setdefault("quantized", {})[kind] = served._asdict()
            auc = "-" if served.auc is None else f"{served.auc:.6f}"
            print(
                f"frozen, rows {kind}: auc={auc}, {served.row_bytes} bytes of an id's row, "
                f"{served.bytes_per_id} bytes an id",
                file=sys.stderr,
            )
        if opts.export:
            package = export_package(frozen, opts.export / kind, version, held_out())
            result.setdefault("exported", {})[kind] = package._asdict()
            print(
                f"package, rows {kind}: {package.path}, {package.bytes:,} bytes, log-odds of "
                f"{package.samples:,} samples differ by {package.largest_difference:.1e} at most",
                file=sys.stderr,
            )
    return result


def evaluate_frozen(frozen: Any, held_out: CriteoReader) -> Served:
    """Compute the AUC of a frozen model, and the size of its tables."""
    auc = Pass(frozen, [], log_every=1, device=frozen.pairs.device).evaluate(held_out)
    tables = [part for part in frozen.modules() if isinstance(part, td.serving.FrozenTables)]
    ids = max(1, sum(sum(part.sizes().values()) for part in tables))
    buffers = {name: buffer for part in tables for name, buffer in part.named_buffers()}
    sizes = {name: buffer.numel() * buffer.element_size() for name, buffer in buffers.items()}
    rows = sum(size for name, size in sizes.items() if name.startswith("weights"))
    return Served(
        None if math.isnan(auc) else auc,
        round(rows / ids, 2),
        round(sum(sizes.values()) / ids, 2),
    )


def export_package(frozen: Any, path: Path, version: int, held_out: CriteoReader) -> Exported:
    """Write a package, load it, and compare its results with those of the model.

    Raises:
        ValueError: Its log-odds differ; the package stays, to be looked at.
    """
    device = frozen.pairs.device
    example = (
        torch.zeros(2, DENSE_COUNT, device=device),
        torch.zeros(CATEGORY_COUNT, 2, dtype=torch.int64, device=device),
    )
    batch_size = Dim("batch")
    shapes = ({0: batch_size}, {1: batch_size})
    td.serving.export(frozen, path, example, dynamic_shapes=shapes, version=version)
    difference, samples = 0.0, 0
    with td.serving.load(path) as served, torch.no_grad():
        for batch in held_out:
            dense, ids, labels = tensors(batch, device)
            apart = (served.run(dense, ids) - frozen(dense, ids)).abs().max().item()
            samples += len(labels)
            if not apart <= TOLERANCE:  # so that NaN is refused
                raise ValueError(
                    f"the package {path} gives log-odds that are {apart} from those of the model, "
                    f"expected at most {TOLERANCE}: do not serve it"
                )
            difference = max(difference, apart)
    size = sum(file.stat().st_size for file in path.iterdir())
    return Exported(str(path), size, samples, difference)
