"""Saving and loading checkpoints against copying their files, and against torch.save's way."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from common.command import is_selected
from common.id_streams import distinct_ids
from common.report import Row, compare, quantity
from common.timing import elapsed_ms, interleave_rounds

import torch_dynemb as td

DIM = 64
COPY, TORCH = "cp and sync", "torch.load and load_state_dict"
SAVE_TARGETS = {1: 1 / 0.75, 26: 1 / 0.5}  # by tables
LOAD_TARGET = 1 / 1.5
EXTRA_BYTES, EXTRA_BYTES_AN_ID = 64 << 20, 17
_IDS_AT_ONCE = 1 << 16


def collection(tables: int) -> td.DynamicEmbeddingBagCollection:
    """Return an empty collection with its tables in one slab."""
    return td.DynamicEmbeddingBagCollection(
        [td.TableConfig(f"table{t}", DIM) for t in range(tables)], optimizer=td.Adagrad(lr=0.1)
    )


def filled(tables: int, ids: int) -> td.DynamicEmbeddingBagCollection:
    """Return a collection with so many ids in all; ids of its tables come in turn."""
    module = collection(tables)
    each = ids // tables
    for begin in range(0, each, _IDS_AT_ONCE // tables):
        count = min(_IDS_AT_ONCE // tables, each - begin)
        for t in range(tables):
            module.group.insert(t, distinct_ids(begin, count))
    module.group.materialize()
    return module


def bytes_of(folder: Path) -> int:
    """Return the size of all files, in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def copy_and_sync(source: Path, target: Path) -> None:
    """Copy a folder and wait until it is on the disk."""
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *(path for path in target.rglob("*") if path.is_file())], check=True)


def timed_anew(work: Callable[[], object], *paths: Path) -> float:
    """Return milliseconds of work that makes paths, which are removed before, untimed."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    return elapsed_ms(work)


def save_case(tables: int) -> str:
    return f"save {tables} table{'s' if tables > 1 else ''}, D={DIM}, Adagrad"


def load_case(tables: int) -> str:
    return f"load {tables} table{'s' if tables > 1 else ''}, D={DIM}, Adagrad"


def save_rows(
    bench: str, folder: Path, ids: int, rounds: int, only: list[str]
) -> Iterator[Row | str]:
    """Yield the rate of a save against that of ``cp`` for the same files, and its memory."""
    for tables, target in SAVE_TARGETS.items():
        if is_selected(only, save_case(tables), COPY):
            yield save_case(tables)
            yield from _save_rows(bench, folder, tables, ids, rounds, target)


def _save_rows(
    bench: str, folder: Path, tables: int, ids: int, rounds: int, target: float
) -> Iterator[Row]:
    module = filled(tables, ids)
    saved, copied = folder / "saved", folder / "copied"

    def save(_: int = 0) -> float:
        return timed_anew(lambda: td.checkpoint.save(saved, module), saved)

    def copy(_: int) -> float:
        return timed_anew(lambda: copy_and_sync(saved, copied), copied)

    extra = extra_memory(save)  # first: memory that was given back is taken again unseen
    timings = interleave_rounds({"copy": copy, "save": save}, rounds=rounds, warmup=1)
    size = bytes_of(saved)
    yield compare(
        bench,
        save_case(tables),
        timings["save"],
        COPY,
        timings["copy"],
        target=target,
        megabytes=size / 1e6,
        megabytes_a_second=size / 1e3 / timings["save"].median_ms,
        peer_megabytes_a_second=size / 1e3 / timings["copy"].median_ms,
    )
    yield quantity(
        bench,
        f"extra memory of {save_case(tables)}",
        extra,
        "bytes",
        target=EXTRA_BYTES + EXTRA_BYTES_AN_ID * ids,
        of_the_table=extra / module.group.usage.memory()["total"],
    )


def load_rows(
    bench: str, folder: Path, ids: int, rounds: int, only: list[str]
) -> Iterator[Row | str]:
    """Yield loads into a new model, as it stood and into other groups, against torch.load."""
    for tables in SAVE_TARGETS:
        if not is_selected(only, load_case(tables), TORCH):
            continue
        yield load_case(tables)
        module = filled(tables, ids)
        saved, file = folder / "saved", folder / "state.pt"
        shutil.rmtree(saved, ignore_errors=True)
        td.checkpoint.save(saved, module)
        torch.save(module.state_dict(), file)
        del module

        def ours(_: int, tables: int = tables, saved: Path = saved) -> float:
            target = collection(tables)
            return elapsed_ms(lambda: td.checkpoint.load(saved, target))

        def theirs(_: int, tables: int = tables, file: Path = file) -> float:
            target = collection(tables)
            return elapsed_ms(lambda: target.load_state_dict(torch.load(file, weights_only=True)))

        timings = interleave_rounds({"ours": ours, "theirs": theirs}, rounds=rounds, warmup=1)
        size = bytes_of(saved)
        yield compare(
            bench,
            load_case(tables),
            timings["ours"],
            TORCH,
            timings["theirs"],
            target=LOAD_TARGET,
            megabytes=size / 1e6,
            megabytes_a_second=size / 1e3 / timings["ours"].median_ms,
        )
        file.unlink()


def extra_memory(work: Callable[[], object]) -> int:
    """Bytes by which a process grows at most while it works; 0 where Linux does not say."""
    reset = Path("/proc/self/clear_refs")
    try:
        reset.write_text("5")  # the peak begins anew
    except OSError:
        return 0
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Return a size of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name} (process {os.getpid()})")
