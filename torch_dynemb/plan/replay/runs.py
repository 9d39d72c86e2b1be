"""Tables under one policy and capacity, through which a stream is played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.initializers import Constant
from torch_dynemb.nn import DynamicEmbeddingBagCollection, KeyedJagged
from torch_dynemb.optim import Ftrl
from torch_dynemb.plan.lines import Lines
from torch_dynemb.plan.replay.grammar import PolicyText
from torch_dynemb.plan.replay.sampling import GROUPS, group_of
from torch_dynemb.policy import Policy
from torch_dynemb.table import TableConfig, TableGroup

_FTRL = Ftrl(lr=0.3, beta=1.0, l2=1.0, initial_accumulator_value=0.0)  # McMahan et al. 2013
_BIAS = "bias"


class Step(NamedTuple):
    """Input of a step.

    Attributes:
        ids: of the tables, which are named by the numbers of the columns.
        labels: float32 [lines], or None.
        now: time in seconds, or None.
    """

    ids: KeyedJagged
    labels: Tensor | None
    now: int | None


def batch_of_lines(lines: Lines, label: str | None, time: str | None) -> Step:
    """Return the input of a step.

    Args:
        lines: of the step.
        label: name of the label; None: there is none, so ids are not divided by line.
        time: name of the time, or None.
    """
    columns = list(lines.columns.values())
    keys = [str(number) for number in range(len(columns))]
    values = [column.ids for column in columns]
    now = None if time is None else int(lines.values[time][-1])
    if label is None:
        ends = torch.tensor([0, *(column.numel() for column in values)], device="cpu").cumsum(0)
        return Step(KeyedJagged(keys, torch.cat(values), ends), None, now)
    every_line = torch.arange(lines.count, device="cpu")
    offsets, done = [], 0
    for column in columns:
        offsets.append(torch.searchsorted(column.lines, every_line) + done)
        done += column.ids.numel()
    offsets += [every_line + done, torch.tensor([done + lines.count], device="cpu")]
    ids = torch.cat([*values, torch.zeros(lines.count, dtype=torch.int64, device="cpu")])
    labels = lines.values[label].float()
    return Step(KeyedJagged([*keys, _BIAS], ids, torch.cat(offsets)), labels, now)


class Used(NamedTuple):
    """Result of a run: misses, and the state of its tables.

    Attributes:
        misses: int64 [columns, groups], lookups without a row, from the middle of the stream on;
            all in group 0 if they are not counted by group.
        rows: ids with a row at the end, by column.
        evicted: ids evicted for others, by column.
        counted: ids without a row that admission counts, by column.
    """

    misses: Tensor
    rows: list[int]
    evicted: list[int]
    counted: list[int]


class Run:
    """Tables of dim 1, one for each column, under one policy.

    With labels they are the weights of a logistic regression, trained by FTRL.

    Args:
        policies: of the tables, by column.
        trains: whether there are labels.
        by_group: whether misses are counted by group of ids, which takes a second lookup.
    """

    def __init__(self, policies: Sequence[Policy], *, trains: bool, by_group: bool) -> None:
        tables = [
            TableConfig(str(number), 1, initializer=Constant(0.0), policy=policy)
            for number, policy in enumerate(policies)
        ]
        self._columns = len(tables)
        self._numbers = list(range(self._columns))
        self._module: DynamicEmbeddingBagCollection | None = None
        if trains:
            bias = TableConfig(_BIAS, 1, initializer=Constant(0.0))
            self._module = DynamicEmbeddingBagCollection([*tables, bias], optimizer=_FTRL)
            self._group = self._module.group
        else:
            self._group = TableGroup(tables, optimizer=None, seed=0)
        self._keeps_time = self._group.config.keeps_time
        self._by_group = by_group
        self._misses = torch.zeros(self._columns, GROUPS, dtype=torch.int64, device="cpu")
        self._before: list[int] | None = None
        self._predicted: list[Tensor] = []

    def play(self, step: Step, *, counts: bool) -> None:
        """Look the ids of a step up as training does, and train if there are labels.

        Args:
            step: the input.
            counts: whether misses count.
        """
        if counts and self._by_group:
            self._count(step.ids)
        elif counts and self._before is None:
            self._before = self._missed()
        now = step.now if self._keeps_time else None
        if now is not None:
            self._group.clock.set_now(now)
        if self._module is None or step.labels is None:
            self._group.find_or_insert(step.ids.values(), step.ids.offsets(), self._numbers)
            self._group.step(now)
            return
        logits = self._module(step.ids).sum(1)
        torch.nn.functional.binary_cross_entropy_with_logits(
            logits, step.labels, reduction="sum"
        ).backward()
        self._module.optimizer.step(now=now)

    def predict(self, step: Step) -> None:
        """Compute the log-odds of held-out lines."""
        assert self._module is not None
        self._module.eval()
        with torch.no_grad():
            self._predicted.append(self._module(step.ids).sum(1))

    def predicted(self) -> Tensor:
        """Return the log-odds of all held-out lines, float32 [n]."""
        return torch.cat(self._predicted)

    def used(self) -> Used:
        """Return what the run did."""
        stats = list(self._group.usage.tables().values())[: self._columns]
        if self._before is not None:
            after = self._missed()
            for column, (now, before) in enumerate(zip(after, self._before, strict=True)):
                self._misses[column, 0] = now - before
        return Used(
            self._misses,
            [table.size for table in stats],
            [table.evicted for table in stats],
            [table.counted for table in stats],
        )

    def _missed(self) -> list[int]:
        stats = self._group.usage.tables()
        return [stats[str(number)].missed for number in self._numbers]

    def _count(self, ids: KeyedJagged) -> None:
        values, offsets = ids.values(), ids.offsets()
        found = self._group.find(values, offsets, self._numbers)
        column = torch.bucketize(
            torch.arange(values.numel(), device="cpu"), offsets[1:], right=True
        )
        place = column * GROUPS + group_of(values)
        missing = place[found.handles < 0]
        self._misses += missing.bincount(minlength=self._misses.numel()).view_as(self._misses)


def policies_of(
    text: PolicyText | None, rows: Mapping[str, int] | None, steps: int, rates: Mapping[str, float]
) -> list[Policy]:
    """Return the policies of the tables of a run.

    Args:
        text: the policy; None: keep all ids.
        rows: capacities by column; None: unlimited.
        steps: of the replay.
        rates: share of the ids that are replayed, by column; capacities are scaled by it.
    """
    if text is None or rows is None:
        return [Policy() for _ in rates]
    return [text.policy(max(1, round(rows[name] * rate)), steps) for name, rate in rates.items()]


__all__ = ["Run", "Step", "Used", "batch_of_lines", "policies_of"]
