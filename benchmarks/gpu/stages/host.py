"""Waits of the host in a training step, and changes by graph replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import torch_dynemb as td
from benchmarks.common.id_streams import spread
from benchmarks.common.report import Row, quantity
from benchmarks.gpu.stages.candidates import Settings, check_device, random_gradient
from benchmarks.gpu.workload import OPTIMIZERS, Ours, bag_batch, capture, generator_of

# The host waits in these, or asks whether it must; a training step should make none of the calls.
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaStreamQuery",
)
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")


def waits_of(run: Callable[[], object]) -> dict[str, int]:
    """Return the waits of the host while it runs something: calls by name, and copies."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        torch.cuda.synchronize()
        with record_function("measured"):
            run()
        torch.cuda.synchronize()
    events = list(profiler.events())
    spans = [
        event.time_range
        for event in events
        if event.name == "measured" and event.device_type == DeviceType.CPU
    ]
    if len(spans) != 1:
        raise RuntimeError(f"the profiler has {len(spans)} events named 'measured', expected one")
    counts = dict.fromkeys((*WAITS, "copies to the host", "launches"), 0)
    for event in events:
        inside = spans[0].start <= event.time_range.start <= spans[0].end
        if event.name in WAITS and inside:
            counts[event.name] += 1
        if event.name.startswith(LAUNCHES) and inside:
            counts["launches"] += 1
        if "Memcpy DtoH" in event.name:
            counts["copies to the host"] += 1
    if counts["launches"] == 0:
        raise RuntimeError("the profiler saw no launch, so it would have seen no wait either")
    return counts


def measure_host(settings: Settings) -> Iterator[Row]:
    """Yield waits of the host in training steps of a module, and what replay changes."""
    if not settings.cuda:
        return
    count, bag, dim, steps = 1 << 16, 16, 64, 20
    generator = generator_of(settings.device, 5)
    for graphed in (False, True):
        module = td.DynamicEmbeddingBagCollection(
            [td.TableConfig("table", dim)],
            optimizer=td.Adam(lr=0.01),
            max_rows=1 << 20,
            device=settings.device,
        )
        ids = torch.randint(1 << 18, (count // bag, bag), generator=generator, device="cuda")
        grad = random_gradient(count // bag, dim, settings.device)

        def eager(module: Any = module, ids: Tensor = ids, grad: Tensor = grad) -> None:
            module({"table": ids}).backward(grad)

        run: Callable[[], object] = eager
        for _ in range(3):
            eager()
            module.optimizer.step()
        if graphed:
            run = capture(eager).replay
        for _ in range(3):
            run()
            module.optimizer.step()
        torch.cuda.synchronize()

        def training(run: Callable[[], object] = run, module: Any = module) -> None:
            for _ in range(steps):
                run()
                module.optimizer.step()

        kind = "replayed" if graphed else "eager"
        counts = waits_of(training)
        for name, value in counts.items():
            # So that memory keeps ahead, a replayed step may wait for the one two steps before. An
            # eager one asks whether the device is done if the host is more than a call ahead.
            waited = "cudaEventSynchronize" if graphed else "cudaStreamQuery"
            free = name in ("launches", waited)
            yield quantity(
                "gpu_host",
                f"{name} in {steps} {kind} training steps",
                value,
                "calls",
                target=None if free else 0,
            )
        check_device(settings)
    yield from replay_differences(settings)


def replay_differences(settings: Settings) -> Iterator[Row]:
    """Yield rows that differ after the same steps, eager and replayed."""
    generator = generator_of(settings.device, 6)
    batches = [bag_batch(4096, 1 << 14, 3000, 16, generator) for _ in range(2)]
    grad = random_gradient((1 << 14) // 16, 32, settings.device)
    for name in OPTIMIZERS:
        results = []
        for graphed in (False, True):
            ours = Ours(
                name,
                tables=1,
                rows=4096,
                dim=32,
                spare=4096,
                bags=True,
                device=settings.device,
            )

            def run(ours: Ours = ours) -> None:
                for batch in batches:
                    ours.step(batch, grad)

            if graphed:
                graph = capture(run)  # runs once before
                for _ in range(4):
                    graph.replay()
                    ours.group.end_step()
            else:
                for _ in range(5):
                    run()
            ids = spread(torch.arange(4096, device=settings.device))
            results.append(ours.group.read(0, ids))
        different = int((results[0] != results[1]).any(dim=1).sum())
        yield quantity(
            "gpu_graph", f"{name}: rows that replay changes otherwise", different, "rows", target=0
        )
