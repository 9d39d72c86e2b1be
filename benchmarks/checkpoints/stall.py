"""Stall of training by an asynchronous save."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from common.command import is_selected
from common.report import Row, compare
from common.timing import elapsed_ms, interleave_rounds
from torch import Tensor, nn
from training.variants import train_all

import torch_dynemb as td
from torch_dynemb import checkpoint, ops
from torch_dynemb.files.disk import Disk
from torch_dynemb.table.state import used_tensors

DIM = 64
TARGET = 0.1
LARGE = 4 << 20  # bytes; larger tensors are copied into memory of large pages


def trained_model(ids: int) -> tuple[nn.Sequential, td.DynamicEmbeddingBag]:
    """Return a model and its table."""
    bag = td.DynamicEmbeddingBag(DIM, mode="sum", name="bench", optimizer=td.Adagrad(lr=0.01))
    train_all(bag, ids, 1 << 16)
    return nn.Sequential(bag, nn.Linear(DIM, 1)), bag


class DiskWithoutData(Disk):
    """Files get their length and no data: no other program waits for the disk, nor we for it."""

    def write(self, file: int, data: memoryview) -> int:
        """Make the file longer."""
        os.ftruncate(file, os.fstat(file).st_size + len(data))
        return len(data)

    def write_at(self, file: int, data: memoryview, begin: int) -> int:
        """Make the file so long that the data would fit, if it is not."""
        os.ftruncate(file, max(os.fstat(file).st_size, begin + len(data)))
        return len(data)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors into new memory as memcpy does, large ones into large pages."""
    made = []
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size < LARGE:
            made.append(tensor.clone())
        else:
            memory = ops.reserve([size], torch.uint8, huge_pages=True)
            made.append(memory.view(tensor.dtype).view(tensor.shape).copy_(tensor))
    return made


def stall_rows(bench: str, ids: int, rounds: int, only: list[str]) -> Iterator[Row | str]:
    """Yield the time of a call of an asynchronous save against copies of the tensors."""
    case = f"stall of an asynchronous save, Adagrad D={DIM}"
    peers: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
        "memcpy into new memory": copies,
        "torch.clone": lambda tensors: [tensor.clone() for tensor in tensors],
    }
    wanted = {peer: of for peer, of in peers.items() if is_selected(only, case, peer)}
    if not wanted:
        return
    yield case
    model, bag = trained_model(ids)
    tensors = [tensor for _, tensor in used_tensors(bag.group.tables)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def ours(number: int) -> float:
        handles = []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "c"
            elapsed = elapsed_ms(
                lambda: handles.append(checkpoint.save(path, model, asynchronous=True))
            )
            handles.pop().wait()
        return elapsed

    def timed(copy: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[int], float]:
        def of_round(number: int) -> float:
            made: list[list[Tensor]] = []  # freed when the clock has stopped
            return elapsed_ms(lambda: made.append(copy(tensors)))

        return of_round

    # the package has a function of this name
    save = sys.modules["torch_dynemb.checkpoint.saving.save"]
    for peer, copy in wanted.items():
        # one peer at a time: the second would find pages that the first has freed
        with patch.object(save, "_DISK", DiskWithoutData()):
            timings = interleave_rounds({"ours": ours, peer: timed(copy)}, rounds=rounds, warmup=2)
        yield compare(
            bench,
            case,
            timings["ours"],
            peer,
            timings[peer],
            target=TARGET if copy is copies else None,
            threads=torch.get_num_threads(),
            bytes=size,
            gigabytes_per_second=size / timings["ours"].median_ms / 1e6,
        )
