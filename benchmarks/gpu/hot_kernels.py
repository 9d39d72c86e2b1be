"""A few launches of the kernels that take most of a step, between marks for Nsight Compute.

A training step of 1 M ids without pooling and one with bags of 16, D=128, Adam, one table each.
"""

from __future__ import annotations

import argparse

import torch
from torch.cuda import profiler

from benchmarks.common.id_streams import ZipfNumbers
from benchmarks.gpu.workload import Ours, bag_batch, generator_of, power_law_batch

DIM = 128
BAG = 16


def run(device: torch.device, *, ids: int, rows: int) -> None:
    """Run two steps of each kind, the second between the marks.

    Args:
        device: of the tables.
        ids: of a batch.
        rows: of a table: Nsight Compute sets memory aside to run a launch more than once.
    """
    generator = generator_of(device, 7)
    flat = power_law_batch(ZipfNumbers(rows, seed=7, device=device), 1, ids, rows)
    bags = bag_batch(rows, ids, ids // 3, BAG, generator)
    work = []
    for batch, pooled in ((flat, False), (bags, True)):
        ours = Ours(
            "Adam",
            tables=1,
            rows=rows,
            dim=DIM,
            spare=ids,
            bags=pooled,
            device=device,
        )
        grad = torch.full((ids // BAG if pooled else ids, DIM), 1e-3, device=device)
        work.append((ours, batch, grad))
    for marked in (False, True):
        if marked and device.type == "cuda":
            torch.cuda.synchronize()
            profiler.start()  # type: ignore[no-untyped-call]
        for ours, batch, grad in work:
            ours.step(batch, grad)
            ours.group.end_step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        profiler.stop()  # type: ignore[no-untyped-call]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a check")
    arguments.add_argument("--ids", type=int, default=1 << 20, help="of a batch (default 1 M)")
    arguments.add_argument("--rows", type=int, default=1 << 20, help="of a table (default 1 M)")
    options = arguments.parse_args()
    run(torch.device(options.device), ids=options.ids, rows=options.rows)
    print(f"two steps of {options.ids} ids on {options.device}")


if __name__ == "__main__":
    main()
