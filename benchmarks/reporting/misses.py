"""Targets that are not met: one line for each group of them, with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .kept import Kept, KeptRow, key_of
from .tables import figure, markdown


class UnexplainedError(LookupError):
    """A missed target without a reason, or a reason without a missed target."""


@dataclass(frozen=True)
class Miss:
    """Missed targets with one reason.

    Attributes:
        name: of the group.
        pattern: matches the whole text "bench, case: peer" of its rows.
        why: the reason, a sentence.
    """

    name: str
    pattern: str
    why: str

    def matches(self, kept: KeptRow) -> bool:
        """Return whether a row belongs to the group."""
        bench, case, peer = key_of(kept.row)
        return re.fullmatch(self.pattern, f"{bench}, {case}: {peer}") is not None


MISSES = (
    Miss(
        "eager step on a GPU / TBE",
        r"gpu_published, Adam step, eager, .*: static TBE, published for an H100",
        "Python queues some 30 launches in that time; a captured graph meets the target.",
    ),
    Miss(
        "step / a static table",
        r"(train_step|optimizers), (SGD|Adagrad|Adam) D=.*: (FBGEMM|nn\.EmbeddingBag).*",
        "A static table has nothing to find, sort or compare; [AVX-512](notes/training.md) meets "
        "most of these targets.",
    ),
    Miss(
        "step / the reference kernel",
        r"train_step, .*: reference kernel .*",
        "The kernel gets row numbers, so it finds nothing; against one with a hash table, steps "
        "take 0.82 to 1.07.",
    ),
    Miss(
        "Adam, bfloat16 rows / our row-wise Adagrad",
        r"(train_step|optimizers), (Adam D=128|RowWiseAdagrad, bf16 rows) .*: our RowWiseAdagrad",
        "Adam has two more numbers for each weight; with bfloat16, only rows shrink, not find and "
        "sort.",
    ),
    Miss(
        "rows of Normal / Constant; decayed counts / frequency",
        r"lifecycle, (training step, Normal rows|find_or_insert of known ids, decayed).*",
        "Normal values are computed one row at a time; a count adds two logarithms from a table.",
    ),
    Miss(
        "insertion from empty; stall of a growth, ns/id",
        r"growth, (insert from empty|stall of a growth step).*",
        "The index grows by 45 % and moves 2.7 times the final number of ids, in whole "
        "lines; only [Zen 5](notes/index.md) meets the second target.",
    ),
    Miss(
        "smallest calls",
        r"overhead, .*",
        "torch converts 12 arguments of an op, and checks 18 inputs of a compiled graph.",
    ),
    Miss(
        "eviction / known ids",
        r"lifecycle, .* with eviction, .*: our known ids",
        "Known ids never read the lines of victims and their scores; the "
        "[reference kernel](notes/eviction.md) misses the target of the index, too.",
    ),
    Miss(
        "frozen package / `nn.EmbeddingBag`, Python",
        r"serving, Python, B=256 L=20.*",
        "Two runs within half an hour had 0.97 and 1.47: lines of the index are read, too, and "
        "other machines share the third cache.",
    ),
    Miss(
        "TorchRec, table_wise",
        r"torchrec_step, table_wise .*",
        "Index lines and generations are read, too; dedup sends more bytes for long bags.",
    ),
    Miss(
        "CPU time of two ranks / one process without TorchRec",
        r"two_ranks, .*",
        "Each rank has Python of torch and TorchRec; static tables take 1.80 to 1.88 times one "
        "rank's time.",
    ),
    Miss(
        "ops on ragged values / one call a feature",
        r"feature_ops, .*",
        "Results of all features are [new pages on every call]"
        "(notes/ragged.md#ops-on-ragged-values); those of one feature reuse memory.",
    ),
    Miss(
        "stall of an asynchronous save; load; step with a delta log; training while publishing",
        r"checkpoint, (stall of an asynchronous save|load 26 tables), .*|delta, a training step, .*"
        r"|freshness, training while publishing .*",
        "A stall copies index and scores; one thread reads and checks; each changed row sets a "
        "byte; a commit of half a second has 100 MB.",
    ),
    Miss(
        "steps with rows in files",
        r"tiers, training step, .*",
        "The step waits for the disk; a prefetch hides as much as the step in memory is long.",
    ),
    Miss(
        "reads / fio; bytes written for a byte",
        r"tiers, (random reads|processor's time for one|bytes written) .*",
        "Reads go to 8 MB, fio's to the same 256 KB; two of 128 segments stay free.",
    ),
    Miss(
        "planned time of a step, relative error",
        r"scale_out, time: .*: target",
        "Costs are linear in ids and bytes, and fitted to two ranks; four ranks share two cores.",
    ),
)


def missed_rows(kept: Kept, misses: tuple[Miss, ...]) -> dict[Miss, list[KeptRow]]:
    """Sort rows that miss their target by the reason.

    Raises:
        UnexplainedError: a row has no reason, or a reason has no row.
    """
    found: dict[Miss, list[KeptRow]] = {miss: [] for miss in misses}
    for row in kept:
        if not row.missed:
            continue
        reasons = [miss for miss in misses if miss.matches(row)]
        if not reasons:
            raise UnexplainedError(
                f"{key_of(row.row)} of {row.source.name} misses its target: add the reason to "
                "MISSES in benchmarks/reporting/misses.py"
            )
        found[reasons[0]].append(row)
    if unused := [miss.name for miss, rows in found.items() if not rows]:
        raise UnexplainedError(
            f"{unused[0]!r} meets its target now: remove it from MISSES in "
            "benchmarks/reporting/misses.py"
        )
    return found


def misses_markdown(kept: Kept, misses: tuple[Miss, ...] = MISSES) -> str:
    """Return the table of missed targets.

    Raises:
        UnexplainedError: see :func:`missed_rows`.
    """
    lines = []
    for miss, rows in missed_rows(kept, misses).items():
        values = [row.row["ratio"] if "target" in row.row else row.row["value"] for row in rows]
        targets = [row.target for row in rows if row.target is not None]
        lines.append([miss.name, _range(values), _range(targets, "{:.3g}"), miss.why])
    return markdown(["goal", "measured", "target", "why"], lines)


def _range(values: list[float], form: str = "") -> str:
    """Return the smallest and the largest value, or the only one."""
    texts = [form.format(value) if form else figure(value) for value in sorted(values)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"
