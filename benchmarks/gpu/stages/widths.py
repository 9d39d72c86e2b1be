"""Every op at several widths and shares of distinct ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.common.report import Row, compare
from benchmarks.gpu import limits
from benchmarks.gpu.limits import Shape
from benchmarks.gpu.stages.candidates import (
    PEER_OPTIMIZERS,
    Candidates,
    Settings,
    against_limit,
    check_device,
    random_gradient,
)
from benchmarks.gpu.workload import OPTIMIZERS, Batch, Ours, Static, bag_batch, generator_of

ADAM_AGAINST_ROWWISE = 1.8  # largest ratio wanted
STATIC_BAG = "nn.EmbeddingBag(sparse)"


def rows_that_fit(settings: Settings, dim: int) -> int:
    """Return ids of each table, so that three of ours and a static one with Adam's state fit."""
    bytes_per_id = 32 * dim + 110
    available = settings.bytes
    if settings.cuda:
        available = min(available, torch.cuda.mem_get_info()[0] * 6 // 10)
    return max(min(settings.rows, available // bytes_per_id), settings.ids)


def measure_dim(settings: Settings, dim: int) -> Iterator[Row]:
    """Yield rows of one width."""
    rows = rows_that_fit(settings, dim)
    tables = {
        name: Ours(
            name,
            tables=1,
            rows=rows,
            dim=dim,
            spare=settings.ids,
            bags=True,
            device=settings.device,
        )
        for name in OPTIMIZERS
    }
    static = Static(rows, dim, bags=True, device=settings.device)
    for share in settings.shares:
        yield from measure_share(settings, dim, rows, share, tables, static)
        check_device(settings)


def measure_share(
    settings: Settings,
    dim: int,
    rows: int,
    share: float,
    tables: dict[str, Ours],
    static: Static,
) -> Iterator[Row]:
    """Yield rows of one width and share of distinct ids."""
    generator = generator_of(settings.device, 7)
    unique = max(round(settings.ids * share), 1)
    batches = [
        bag_batch(rows, settings.ids, unique, settings.bag, generator)
        for _ in range(settings.batches)
    ]
    bags = settings.ids // settings.bag
    shape = Shape(ids=settings.ids, unique=unique, bags=bags, dim=dim)
    grad = random_gradient(bags, dim, settings.device)
    reader = tables["SGD"]
    handles = {name: [ours.find(batch) for batch in batches] for name, ours in tables.items()}
    missing = sum(int((found < 0).sum()) for found in handles["SGD"])
    if missing:
        raise RuntimeError(f"{missing} ids of the batches are not in the table that was filled")

    candidates = Candidates(settings, batches)
    candidates.replayed("find", lambda _, batch: reader.find(batch))
    candidates.replayed("find_or_insert_", lambda _, batch: reader.find_or_insert(batch))
    candidates.replayed(
        "embedding_inference", lambda n, batch: reader.read(batch, handles["SGD"][n])
    )
    candidates.replayed("lookup", lambda _, batch: reader.lookup(batch))
    candidates.eager("lookup, eager", lambda _, batch: reader.lookup(batch))
    candidates.peer(STATIC_BAG, lambda _, batch: static.lookup(batch))
    for name, ours in tables.items():

        def backward(n: int, batch: Batch, name: str = name, ours: Ours = ours) -> None:
            ours.backward(batch, handles[name][n], grad)

        def step(n: int, batch: Batch, ours: Ours = ours) -> None:
            ours.step(batch, grad)

        candidates.eager(f"{name} step, eager", step)
        candidates.replayed(f"{name} backward", backward)
        candidates.replayed(f"{name} step", step, ours.group.end_step)
    for name in PEER_OPTIMIZERS:

        def peer_step(n: int, batch: Batch, name: str = name) -> None:
            static.step(batch, grad, name)

        candidates.peer(f"{STATIC_BAG} {name}", peer_step)

    timings = candidates.time()
    parts = {
        "find": [limits.find(shape)],
        "find_or_insert_": [limits.find_or_insert(shape)],
        "embedding_inference": [limits.lookup_rows(shape)],
        "lookup": limits.lookup_parts(shape),
    }
    for name in tables:
        parts[f"{name} backward"] = [limits.backward(shape, name)]
        parts[f"{name} step"] = limits.step_parts(shape, name)
    suffix = f"D={dim} U/N={share:g}"

    def row(
        bench: str, op: str, peer: str | None, *, timed: str | None = None, **extra: Any
    ) -> Row:
        timing = timings[timed or op]
        return compare(
            bench,
            f"{timed or op} {suffix}",
            timing,
            extra.pop("peer_label", peer),
            None if peer is None else timings[peer],
            op=op,
            share=share,
            table_rows=rows,
            **extra,
            **against_limit(settings, parts[op], timing, shape),
        )

    for op in ("find", "find_or_insert_", "embedding_inference"):
        yield row("gpu_ops", op, None)
    yield row("gpu_lookup", "lookup", STATIC_BAG)
    yield row("gpu_lookup", "lookup", STATIC_BAG, timed="lookup, eager")
    sort = limits.gradient_sort(shape, rows + settings.ids)
    for name in tables:
        peer = f"{STATIC_BAG} {name}" if name in PEER_OPTIMIZERS else None
        label = f"{STATIC_BAG} {PEER_OPTIMIZERS[name]}" if peer else None
        yield row("gpu_ops", f"{name} backward", None, sort_bytes=sort.bytes)
        yield row("gpu_train_step", f"{name} step", peer, peer_label=label)
        yield row(
            "gpu_train_step", f"{name} step", peer, peer_label=label, timed=f"{name} step, eager"
        )
        if settings.cuda:
            yield compare(
                "gpu_graph",
                f"{name} step, replay {suffix}",
                timings[f"{name} step"],
                "our eager step",
                timings[f"{name} step, eager"],
            )
    yield compare(
        "gpu_train_step",
        f"Adam step {suffix}",
        timings["Adam step"],
        "our RowWiseAdagrad step",
        timings["RowWiseAdagrad step"],
        target=ADAM_AGAINST_ROWWISE,
    )
    yield from candidates.launched("dims")
