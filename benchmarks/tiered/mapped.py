"""Training steps of a table in files against those of a file that is mapped to memory.

Both have the same memory beside what the process needs: that of our index and our cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from mmap import MADV_RANDOM, mmap
from pathlib import Path

import torch
from common.command import is_selected
from common.id_streams import ZipfNumbers, spread
from common.report import Row, compare
from common.timing import elapsed_ms, interleave_rounds
from tiered.memory_limit import limited_memory
from tiered.training import BAG, DIM, MOST_AHEAD, Sizes, Trained
from torch import Tensor
from torch.nn import functional

import torch_dynemb as td

PEER = "mapped file"
TARGET = 1 / 8
CACHE = "25%"
EXPONENTS = (1.05, 1.2, 1.5)
LEARNING_RATE, BETA1, BETA2, EPSILON = 0.01, 0.9, 0.999, 1e-8
ROW = 3 * DIM  # a weight and two states for each column
SLOT_BYTES = 4 * ROW + 4 + 36  # of our cache: a row, its generation, what lies in it
SLACK_BYTES = 64 << 20  # tensors of a step, tables of pages


class MappedTable:
    """Rows with their Adam state, one beside the other in a file that the system maps to memory.

    A row has a number, and nothing looks an id up. A step reads each row once and writes it once.

    Args:
        path: of the file, which is made.
        rows: of the table.
        bags: of a step.
    """

    def __init__(self, path: Path, rows: int, bags: int) -> None:
        size = rows * ROW * 4
        with path.open("w+b") as file:
            for begin in range(0, rows, 1 << 16):
                part = torch.zeros(min(1 << 16, rows - begin), ROW)
                part[:, :DIM].uniform_(-0.01, 0.01)
                file.write(part.numpy().data)
            file.flush()
            self._map = mmap(file.fileno(), size)
        self._map.madvise(MADV_RANDOM)  # the kernel reads no pages beside the one that is wanted
        self._rows = torch.frombuffer(self._map, dtype=torch.float32).view(rows, ROW)
        self._grad = torch.full((bags, DIM), 1e-3)
        self._step = 0

    def flush(self) -> None:
        """Write all changed pages, so that the system can drop any."""
        self._map.flush()

    def steps(self, batches: list[Tensor]) -> None:
        """Train on batches of row numbers, int64 [bags, ids of a bag]."""
        for batch in batches:
            self._train(batch)

    def _train(self, batch: Tensor) -> None:
        numbers, inverse = torch.unique(batch, return_inverse=True)
        records = self._rows[numbers]
        weights, momentum, variance = records.split(DIM, dim=1)
        leaf = weights.contiguous().requires_grad_()
        functional.embedding_bag(inverse, leaf, mode="sum").backward(self._grad)
        grad = leaf.grad
        assert grad is not None
        self._step += 1
        momentum.lerp_(grad, 1 - BETA1)
        variance.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        root = variance.sqrt().mul_((1 - BETA2**self._step) ** -0.5).add_(EPSILON)
        weights.addcdiv_(momentum, root, value=-LEARNING_RATE / (1 - BETA1**self._step))
        self._rows[numbers] = records


def mapped_rows(
    bench: str, folder: Path, sizes: Sizes, cgroup: Path, only: list[str]
) -> Iterator[Row | str]:
    """Yield the name of each case as it starts, then its row."""
    for exponent in EXPONENTS:
        case = f"training step, Adam D={DIM}, memory for {CACHE} of the rows, Zipf {exponent}"
        if not is_selected(only, case, PEER):
            continue
        yield case
        with tempfile.TemporaryDirectory(dir=folder) as files, limited_memory(cgroup) as limit:
            peer = MappedTable(Path(files) / "mapped", sizes.ids, sizes.bags)
            storage = td.SSDStore(Path(files) / "rows", cache=CACHE)
            ours = Trained(sizes, storage)
            slots = sizes.ids * int(CACHE.removesuffix("%")) // 100
            beside = slots * SLOT_BYTES + ours.index_bytes()
            peer.flush()
            limit.set(limit.anonymous_bytes() + beside + SLACK_BYTES)
            numbers = ZipfNumbers(sizes.ids, seed=1, exponent=exponent)

            def draw(count: int, numbers: ZipfNumbers = numbers) -> list[Tensor]:
                return [numbers.draw(sizes.bags * BAG).view(-1, BAG) for _ in range(count)]

            settled = draw(sizes.settling)
            rounds = [draw(sizes.calls) for _ in range(1 + sizes.rounds)]
            peer.steps(settled)
            ours.steps(_ids(settled))
            timings = interleave_rounds(
                {
                    "ours": _timed(ours, [_ids(batches) for batches in rounds], sizes.calls),
                    "peer": _timed(peer, rounds, sizes.calls),
                },
                rounds=sizes.rounds,
                warmup=1,
            )
            del ours
        yield compare(
            bench,
            case,
            timings["ours"],
            PEER,
            timings["peer"],
            target=TARGET,
            calls=sizes.calls,
            memory=beside,
            ids=sizes.ids,
            bags=sizes.bags,
            bag=BAG,
            threads=torch.get_num_threads(),
        )


def _ids(batches: list[Tensor]) -> list[Tensor]:
    """Return ids of row numbers, and at the end batches that are not trained on."""
    return [spread(batch) for batch in [*batches, *batches[:1] * MOST_AHEAD]]


def _timed(
    table: Trained | MappedTable, rounds: list[list[Tensor]], steps: int
) -> Callable[[int], float]:
    """Return milliseconds of a step, the mean of a round's."""
    return lambda number: elapsed_ms(lambda: table.steps(rounds[number])) / steps
