"""Resident memory of a model that has trained, in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from whole_job.models import OURS, TORCHREC, fill, make_candidate
from whole_job.samples import Samples
from whole_job.steps import training_step

_STEPS = 4
_RESIDENT = ("RssAnon:", "RssShmem:")  # without pages of files, such as the samples


class MemoryJob(NamedTuple):
    """Arguments of a process.

    Attributes:
        name: of the candidate.
        optimizer: of its rows.
        sizes: of the vocabulary.
        table_bytes: of dynamic tables.
        folder: with dense.npy, ids.npy, rows.npy and labels.npy.
        batch: samples of a step.
        threads: of a step.
    """

    name: str
    optimizer: str
    sizes: list[int]
    table_bytes: int
    folder: Path
    batch: int
    threads: int


def save_samples(folder: Path, samples: Samples, rows: torch.Tensor) -> None:
    """Write what the processes read: samples, and the rows of their ids in the vocabulary."""
    arrays = samples._asdict() | {"rows": rows}
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values.numpy())


def resident_memory(job: MemoryJob) -> int:
    """Bytes by which a process grows when it makes a model and trains with all samples.

    Tables with a vocabulary are made whole and trained for some steps; dynamic tables get the ids
    of all samples, too.

    Raises:
        RuntimeError: with the traceback of the process, if it fails.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(theirs, job), daemon=True)
    process.start()
    theirs.close()
    answer = ours.recv()
    process.join()
    if isinstance(answer, str):
        raise RuntimeError(f"{job.name}: the process that measures its memory failed:\n{answer}")
    grown: int = answer
    return grown


def _measure(pipe: Connection, job: MemoryJob) -> None:
    try:
        pipe.send(_grown(job))
    except BaseException:  # the parent reports it
        pipe.send(traceback.format_exc())


def _grown(job: MemoryJob) -> int:
    torch.set_num_threads(job.threads)
    dense, ids, rows, labels = (
        torch.from_numpy(np.load(job.folder / f"{name}.npy", mmap_mode="c"))
        for name in ("dense", "ids", "rows", "labels")
    )
    if job.name == TORCHREC:
        import whole_job.torchrec_rows  # noqa: F401  not part of the model's memory
    gc.collect()
    before = _resident()
    candidate = make_candidate(job.name, job.optimizer, job.sizes, job.table_bytes)
    samples = Samples(dense, rows if candidate.takes_rows else ids, labels)
    if job.name == OURS:
        fill(candidate.model.rows, samples.ids, job.batch)  # type: ignore[arg-type]
    step = training_step(candidate, compiled=False)
    for number in range(_STEPS):
        step(samples.part(number * job.batch, (number + 1) * job.batch))
    gc.collect()
    return _resident() - before


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = [line.split() for line in lines if line.startswith(_RESIDENT)]
    return sum(int(kibibytes) for _, kibibytes, _ in fields) * 1024
