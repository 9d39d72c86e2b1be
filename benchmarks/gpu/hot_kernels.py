"""The kernels that take most of a step: a few launches between marks for Nsight Compute, or times.

A training step of 1 M ids without pooling and one with bags of 16, D=128, one table each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.cuda import profiler
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.id_streams import ZipfNumbers
from benchmarks.gpu.workload import (
    OPTIMIZERS,
    Batch,
    Ours,
    bag_batch,
    generator_of,
    power_law_batch,
)

DIM = 128
BAG = 16
STEPS = 5  # that are timed
Step = Callable[[], None]


def make_steps(device: torch.device, optimizer: str, *, ids: int, rows: int) -> dict[str, Step]:
    """Return training steps by name.

    Args:
        device: of the tables.
        optimizer: a key of OPTIMIZERS.
        ids: of a batch.
        rows: of a table: Nsight Compute sets memory aside to run a launch more than once.
    """
    generator = generator_of(device, 7)
    flat = power_law_batch(ZipfNumbers(rows, seed=7, device=device), 1, ids, rows)
    bags = bag_batch(rows, ids, ids // 3, BAG, generator)
    steps = {}
    for name, batch, pooled in (("power law, no pooling", flat, False), ("bags of 16", bags, True)):
        ours = Ours(
            optimizer,
            tables=1,
            rows=rows,
            dim=DIM,
            spare=ids,
            bags=pooled,
            device=device,
        )
        grad = torch.full((ids // BAG if pooled else ids, DIM), 1e-3, device=device)

        def step(ours: Ours = ours, batch: Batch = batch, grad: Tensor = grad) -> None:
            ours.step(batch, grad)
            ours.group.end_step()

        steps[name] = step
    return steps


def run_marked(device: torch.device, *, ids: int, rows: int) -> None:
    """Run two steps of each kind with Adam, the second between the marks."""
    steps = make_steps(device, "Adam", ids=ids, rows=rows)
    for marked in (False, True):
        if marked and device.type == "cuda":
            torch.cuda.synchronize()
            profiler.start()  # type: ignore[no-untyped-call]
        for step in steps.values():
            step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        profiler.stop()  # type: ignore[no-untyped-call]


def time_kernels(device: torch.device, *, ids: int, rows: int) -> None:
    """Print microseconds of each kernel of a step, by optimizer and kind of step."""
    for optimizer in OPTIMIZERS:
        for name, step in make_steps(device, optimizer, ids=ids, rows=rows).items():
            for _ in range(3):
                step()
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                for _ in range(STEPS):
                    step()
                torch.cuda.synchronize()
            events = sorted(profiled.key_averages(), key=lambda one: -one.device_time_total)
            print(f"{optimizer}, {name}: us a step, launches a step, kernel")
            for one in events:
                if one.device_time_total > 0:
                    launches = one.count / STEPS
                    print(f"{one.device_time_total / STEPS:9.1f} {launches:5.1f}  {one.key[:100]}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a check")
    arguments.add_argument("--ids", type=int, default=1 << 20, help="of a batch (default 1 M)")
    arguments.add_argument("--rows", type=int, default=1 << 20, help="of a table (default 1 M)")
    arguments.add_argument("--times", action="store_true", help="of kernels, by torch's profiler")
    options = arguments.parse_args()
    run = time_kernels if options.times else run_marked
    run(torch.device(options.device), ids=options.ids, rows=options.rows)
    print(f"steps of {options.ids} ids on {options.device}")


if __name__ == "__main__":
    main()
