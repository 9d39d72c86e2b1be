"""Descriptions of files written by ``torch.save``: sizes and policies of tables, ages of ids."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb.console.lines import aligned, in_bytes, optimizer_name
from torch_dynemb.ops.columns import BUCKET_WIDTH, Table
from torch_dynemb.table.config import SlabConfig
from torch_dynemb.table.state_entries import read_format

BAR_WIDTH = 40  # characters of the fullest bin
BINS = 10


class GroupEntries(NamedTuple):
    """Entries of one table group in a state dict.

    Attributes:
        prefix: prefix of the names, without the last dot; empty if there is none.
        description: content of the ``format`` entry.
        tensors: tensors by name, without the prefix.
    """

    prefix: str
    description: dict[str, Any]
    tensors: dict[str, Tensor]


def saved_groups(checkpoint: Any, path: str = "") -> Iterator[GroupEntries]:
    """Find the table groups in nested dicts."""
    if not isinstance(checkpoint, Mapping):
        return
    for key, value in checkpoint.items():
        name = str(key)
        if isinstance(value, Mapping):
            yield from saved_groups(value, f"{path}{name}.")
        elif name.split(".")[-1] == "format" and isinstance(value, Tensor):
            prefix = name.removesuffix("format")
            if f"{prefix}tables" not in checkpoint:
                continue  # of another library
            description = read_format({"format": value})
            names = [*_index_entries(description), *_row_entries(description), "tables", "clock"]
            found = {name: checkpoint.get(prefix + name) for name in names}
            tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
            absent = sorted(set(found) - set(tensors))
            if absent:
                raise ValueError(f"{(path + prefix).rstrip('.') or 'tables'} lack {absent}")
            yield GroupEntries((path + prefix).rstrip("."), description, tensors)


def _index_entries(description: dict[str, Any]) -> list[str]:
    """Return the names of the entries that hold ids."""
    kinds = ["buckets", *(["scores"] if description["scores"] else [])]
    return [f"{table['name']}.{kind}" for table in description["tables"] for kind in kinds]


def _row_entries(description: dict[str, Any]) -> list[str]:
    """Return the names of the entries with one element per row."""
    optimizer = description["optimizer"]
    kinds = ["weights", "generations"]
    kinds += [] if optimizer is None else [name for name, _, _ in optimizer["state"]]
    slabs = {
        SlabConfig(table["embedding_dim"], getattr(torch, table["dtype"])).name: None
        for table in description["tables"]
    }
    return [f"{slab}.{kind}" for slab in slabs for kind in kinds]


def load(path: Path) -> list[GroupEntries]:
    """Load the table groups of a file written by ``torch.save``.

    Raises:
        ValueError: the file has no tables, or cannot be read.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except UnicodeError as error:
        raise ValueError(
            f"{path}: cannot be read as a checkpoint: its path is not UTF-8, which torch.load "
            "needs: rename it"
        ) from error
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: cannot be read as a checkpoint: it has pickled objects beside tensors, which "
            "could run any code, or it is damaged: save state dicts with torch.save"
        ) from error
    except Exception as error:  # torch.load raises many kinds of errors
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: cannot be read as a checkpoint: {first}") from error
    try:
        groups = list(saved_groups(checkpoint))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as a checkpoint: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: cannot be read as a checkpoint: an entry 'format' is damaged: {error!r}"
        ) from error
    if not groups:
        raise ValueError(f"{path}: the file has no tables of torch_dynemb")
    return groups


def histogram(scores: Tensor) -> list[str]:
    """Format a histogram of int64 [n] as lines of text."""
    if scores.numel() == 0:
        return ["no ids"]
    low, high = int(scores.min()), int(scores.max())
    width = -(-(high - low + 1) // BINS)
    firsts = list(range(low, high + 1, width))
    # not by subtraction, which could leave the range of int64
    numbers = torch.bucketize(scores, torch.tensor(firsts, device="cpu"), right=True) - 1
    counts = torch.bincount(numbers, minlength=len(firsts)).tolist()
    ranges = []
    for first, count in zip(firsts, counts, strict=True):
        last = min(first + width - 1, high)
        ranges.append([str(first) if last == first else f"{first} - {last}", str(count)])
    bars = ["#" * round(BAR_WIDTH * count / max(counts)) for count in counts]
    return [f"{line}  {bar}".rstrip() for line, bar in zip(aligned(ranges), bars, strict=True)]


def describe(group: GroupEntries) -> str:
    """Describe a group as text.

    Raises:
        ValueError: its entries are inconsistent.
    """
    try:
        return _described(group)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{group.prefix or 'tables'}: the entries are inconsistent: {error!r}"
        ) from error


def _described(group: GroupEntries) -> str:
    about, tensors = group.description, group.tensors
    lines = [
        f"{group.prefix or 'tables'}: optimizer {optimizer_name(about['optimizer'])}, "
        f"step {int(tensors['clock'][0])}, format {about['version']}"
    ]
    rows = [
        [
            "table",
            "dim",
            "dtype",
            "ids",
            "load",
            "inserted",
            "evicted",
            "removed",
            "growths",
            "index",
            "score",
            "capacity",
            "admission",
        ]
    ]
    # entries of the tables come first, then those of the counters for admission
    for table, counts in zip(about["tables"], tensors["tables"].tolist(), strict=False):
        policy = about["policies"][table["name"]]
        slots = counts[Table.BUCKET_COUNT] * BUCKET_WIDTH
        index = [tensors.get(f"{table['name']}.{kind}") for kind in ("buckets", "scores")]
        rows.append(
            [
                table["name"],
                str(table["embedding_dim"]),
                table["dtype"],
                str(counts[Table.SIZE]),
                f"{counts[Table.SIZE] / slots:.2f}",
                str(counts[Table.INSERTED]),
                str(counts[Table.EVICTED]),
                str(counts[Table.ERASED]),
                str(counts[Table.GROWTHS]),
                in_bytes(sum(t.numel() * t.element_size() for t in index if t is not None)),
                policy["score"],
                str(policy["capacity"] or "-"),
                policy["admission"] or "-",
            ]
        )
    lines += aligned(rows)
    row_bytes = sum(
        tensors[name].numel() * tensors[name].element_size() for name in _row_entries(about)
    )
    lines.append(f"rows and optimizer state: {in_bytes(row_bytes)}")
    for table in about["tables"]:
        occupied = tensors[f"{table['name']}.buckets"][:, BUCKET_WIDTH:] > 0
        for number, word in enumerate(about["scores"]):
            first = number * BUCKET_WIDTH
            scores = tensors[f"{table['name']}.scores"][:, first : first + BUCKET_WIDTH]
            lines += ["", f"{word} of {table['name']}:", *histogram(scores[occupied])]
    return "\n".join(lines)


__all__ = ["GroupEntries", "describe", "histogram", "load", "saved_groups"]
