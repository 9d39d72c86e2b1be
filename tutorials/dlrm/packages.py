"""A trained model as packages that serve it, compared with what was compiled."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch.export import Dim

import torch_dynemb as td
from tutorials.dlrm.criteo import CriteoReader
from tutorials.dlrm.loop import tensors
from tutorials.dlrm.model import DENSE_COUNT, DLRM
from tutorials.dlrm.options import Options
from tutorials.dlrm.parsing import CATEGORY_COUNT
from tutorials.dlrm.quantized import kinds_of_rows

TOLERANCE = 1e-4
"""Between log-odds of compiled and of eager code, which add up in other orders."""


class Exported(NamedTuple):
    """A package that has been written, loaded and compared."""

    path: str
    bytes: int
    """Of all its files."""
    samples: int
    """That it was compared on: the held-out ones."""
    largest_difference: float
    """Between its log-odds and those of the frozen model."""


def check_places(opts: Options) -> None:
    """Refuse folders that are there, before anything is trained.

    Raises:
        ValueError: One of --export is.
    """
    for kind, _ in kinds_of_rows(opts):
        if opts.export is not None and (opts.export / kind).exists():
            raise ValueError(
                f"--export {opts.export}: {opts.export / kind} is there: choose another folder, or "
                "remove it"
            )


def export_package(frozen: DLRM, path: Path, version: int, held_out: CriteoReader) -> Exported:
    """Write a package, load it, and compare what it gives with what the model gives.

    Args:
        frozen: With read-only tables, in eval mode.
        path: Of a folder that is not there yet.
        version: What the package is called: how many steps the model has been trained for.
        held_out: Yields the samples to compare on.

    Raises:
        ValueError: Its log-odds are others; the package stays, to be looked at.
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
            expected = frozen(dense, ids)
            apart = (served.run(dense, ids) - expected).abs().max().item()
            samples += len(labels)
            if not apart <= TOLERANCE:  # so that NaN is refused
                raise ValueError(
                    f"the package {path} gives log-odds that are {apart} from those of the model, "
                    f"expected at most {TOLERANCE}: do not serve it"
                )
            difference = max(difference, apart)
    size = sum(file.stat().st_size for file in path.iterdir())
    return Exported(str(path), size, samples, difference)
