"""The training step of `make train`, whole: DLRM with 26 tables, D=16, batch 2048 and 8192.

Dynamic tables are compared with the same model on tables of a fixed size:

* nn.EmbeddingBag(sparse=True) with a vocabulary made in advance, by feature and all in one;
* the hashing trick in the same memory;
* TorchRec's static tables with the fused kernel, on one rank.

A step is zero gradients, forward, backward and all optimizers, without reading data; eager and
compiled. Then come the parts of our step, the memory of each model in a process of its own, and
the time of making the vocabulary.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common.command import is_selected, parser, positive
from common.report import Report, Row, compare, quantity
from common.timing import elapsed_ms, interleave_rounds

sys.path.append(str(Path(__file__).resolve().parents[1]))

from whole_job.memory import MemoryJob, resident_memory, save_samples
from whole_job.models import (
    OPTIMIZERS,
    OURS,
    PEERS,
    TORCHREC,
    Candidate,
    bytes_of_tables,
    fill,
    make_candidate,
)
from whole_job.samples import Samples, Vocabulary, generated, make_vocabulary, read
from whole_job.steps import Step, parts_of_a_step, training_step

from tutorials.dlrm.job.planted import PlantedConfig

BENCH = "dlrm"
TARGET = 1.0
WARMUP = 2
MODES = ("eager", "compiled")
PROFILED = 8  # steps
VOCABULARY = "seconds of making the vocabulary"
MAPPING = "seconds of replacing ids by rows"
DIVISOR = PlantedConfig.cardinality_divisor
ROWS = 2 * (len(MODES) * len(PEERS) + 7) + 1 + len(PEERS)  # of an optimizer


@dataclass
class Job:
    """Sizes of a measurement, and how far the samples have been used.

    Attributes:
        samples, vocabulary: all that there are.
        optimizer: of the rows.
        table_bytes: of dynamic tables with all ids of the samples.
        round_samples: samples of each timed round.
        rounds: that are timed.
        only: comparisons that are wanted.
        used: samples before the next case.
        models: that have been made.
    """

    samples: Samples
    vocabulary: Vocabulary
    optimizer: str
    table_bytes: int
    round_samples: int
    rounds: int
    only: Sequence[str]
    used: int
    models: dict[str, Candidate] = field(default_factory=dict)

    def name(self, batch: int, mode: str) -> str:
        return f"{self.optimizer} B={batch}, {mode}"

    def candidate(self, name: str) -> Candidate:
        """Return the model of a name, made at first use; ours then knows the earlier ids."""
        if name not in self.models:
            self.models[name] = make_candidate(
                name, self.optimizer, self.vocabulary.sizes, self.table_bytes
            )
            if name == OURS:
                fill(self.models[name].model.rows, self.samples.ids[:, : self.used])  # type: ignore[arg-type]
        return self.models[name]

    def batches(self, name: str, batch: int, begin: int, count: int) -> list[Samples]:
        """Return batches of a candidate, from sample ``begin`` on, with ids or with rows."""
        dense, ids, labels = self.samples
        given = self.vocabulary.rows if self.candidate(name).takes_rows else ids
        mine = Samples(dense, given, labels)
        return [mine.part(at, at + batch) for at in range(begin, begin + count * batch, batch)]


def steps_of(job: Job, names: Sequence[str], batch: int, mode: str) -> dict[str, Step]:
    """Return steps by name of the candidate, each called once, of those that can be compiled."""
    steps: dict[str, Step] = {}
    for name in names:
        step = training_step(job.candidate(name), compiled=mode == "compiled")
        try:
            step(job.batches(name, batch, 0, 1)[0])
        except torch._dynamo.exc.TorchDynamoException as error:
            if name == OURS:
                raise
            print(f"{name}: left out, it does not compile: {error}", file=sys.stderr)
            continue
        steps[name] = step
    return steps


def timed_rows(job: Job, batch: int, mode: str) -> Iterator[Row]:
    """Yield our step against that of every peer that is wanted, all in turn."""
    case = job.name(batch, mode)
    peers = [peer for peer in available_peers() if is_selected(job.only, case, peer)]
    if not peers:
        return
    torch.compiler.reset()  # torch counts how often the loss is compiled, for whatever model
    steps = steps_of(job, [OURS, *peers], batch, mode)
    calls = max(1, job.round_samples // batch)
    begin = job.used

    def milliseconds(name: str, number: int) -> float:
        batches = job.batches(name, batch, begin + number * calls * batch, calls)

        def work() -> None:
            for each in batches:
                steps[name](each)

        return elapsed_ms(work) / calls

    timings = interleave_rounds(
        {name: lambda number, name=name: milliseconds(name, number) for name in steps},  # type: ignore[misc]
        rounds=job.rounds,
        warmup=WARMUP,
    )
    job.used += (WARMUP + job.rounds) * calls * batch
    for peer in list(steps)[1:]:
        yield compare(
            BENCH,
            case,
            timings[OURS],
            peer,
            timings[peer],
            target=TARGET,
            samples_per_s=batch / timings[OURS].median_ms * 1e3,
            peer_samples_per_s=batch / timings[peer].median_ms * 1e3,
            threads=torch.get_num_threads(),
        )


def part_rows(job: Job, batch: int) -> Iterator[Row]:
    """Yield the parts of our eager step."""
    case = f"parts of {job.name(batch, 'eager')}"
    if not is_selected(job.only, case, OURS):
        return
    step = steps_of(job, [OURS], batch, "eager")[OURS]
    batches = job.batches(OURS, batch, job.used, PROFILED)
    job.used += PROFILED * batch
    step(batches[0])
    for part, spent in parts_of_a_step(step, batches[1:]).items():
        yield quantity(BENCH, f"{case}: {part}", spent, "ms")


def memory_rows(job: Job, batch: int) -> Iterator[Row]:
    """Yield resident memory of each candidate."""
    case = f"memory of {job.optimizer}"
    wanted = [n for n in (OURS, *available_peers()) if is_selected(job.only, case, n)]
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as folder:
        save_samples(Path(folder), job.samples, job.vocabulary.rows)
        for name in wanted:
            told = MemoryJob(
                name,
                job.optimizer,
                job.vocabulary.sizes,
                job.table_bytes,
                Path(folder),
                batch,
                torch.get_num_threads(),
            )
            grown = resident_memory(told) / 2**20
            more = {"counted_table_mib": job.table_bytes / 2**20} if name == OURS else {}
            yield quantity(BENCH, f"{case}: {name}", grown, "MiB", **more)


def vocabulary_rows(vocabulary: Vocabulary, only: Sequence[str]) -> Iterator[Row]:
    """Yield the time that tables of a fixed size need before training."""
    ids = {"ids": vocabulary.rows.numel(), "distinct": sum(vocabulary.sizes)}
    for case, seconds in ((VOCABULARY, vocabulary.seconds), (MAPPING, vocabulary.mapping_seconds)):
        if is_selected(only, case, ""):
            yield quantity(BENCH, case, seconds, "s", **ids)


def available_peers() -> list[str]:
    return [peer for peer in PEERS if peer != TORCHREC or has_torchrec()]


def has_torchrec() -> bool:
    packages = ("torchrec", "fbgemm_gpu")
    return all(importlib.util.find_spec(package) is not None for package in packages)


def measured(job: Job, batches: Sequence[int]) -> Iterator[Row]:
    """Yield all rows of an optimizer."""
    for batch in batches:
        for mode in MODES:
            yield from timed_rows(job, batch, mode)
        yield from part_rows(job, batch)
    job.models.clear()
    yield from memory_rows(job, batches[0])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "files",
        nargs="*",
        type=Path,
        help="in the Criteo format (default: the samples that make train generates)",
    )
    arguments.add_argument(
        "--optimizers",
        nargs="+",
        choices=OPTIMIZERS,
        default=OPTIMIZERS[:1],
        help=f"of the rows (default {OPTIMIZERS[0]}, as in make train)",
    )
    arguments.add_argument(
        "--batches",
        nargs="+",
        type=positive,
        default=(2048, 8192),
        metavar="B",
        help="samples of a step (default 2048 8192)",
    )
    arguments.add_argument(
        "--fill",
        type=positive,
        help="samples before the timed ones, with ids that our tables know (default 393,216)",
    )
    arguments.add_argument(
        "--cardinality-divisor",
        type=positive,
        help="of generated samples (default: that of make train)",
    )
    arguments.add_argument(
        "--threads", type=positive, default=torch.get_num_threads(), help="of a step (default all)"
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if not has_torchrec():
        print(f"{TORCHREC}: left out, torchrec or fbgemm_gpu is not installed", file=sys.stderr)
    filled = options.fill or (8192 if options.quick else 393_216)
    round_samples = max(options.batches) if options.quick else 2 * max(options.batches)
    rounds = len(MODES) * len(options.batches) * (WARMUP + options.rounds)
    count = filled + rounds * round_samples + PROFILED * sum(options.batches)
    divisor = options.cardinality_divisor or (1000 if options.quick else DIVISOR)
    samples = read(options.files, count) if options.files else generated(count, divisor)
    vocabulary = make_vocabulary(samples.ids)
    report = Report(as_json=options.json, cases=2 + len(options.optimizers) * ROWS)
    report.take(vocabulary_rows(vocabulary, options.only))
    for optimizer in options.optimizers:
        table_bytes = bytes_of_tables(optimizer, samples.ids)
        job = Job(
            samples,
            vocabulary,
            optimizer,
            table_bytes,
            round_samples,
            options.rounds,
            options.only,
            filled,
        )
        report.take(measured(job, options.batches))
    report.close()


if __name__ == "__main__":
    main()
