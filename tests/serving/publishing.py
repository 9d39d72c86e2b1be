"""A trainer of the small model that publishes to a delta log from the base of its live package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from logged_batches import logged_table
from packaged import Features, SmallModel, base_of, features, small_model
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.changes.batch import ERASE, ROWS, Head, Pieces, encoded
from torch_dynemb.changes.payloads import LoggedPart, of_tables, of_tensors
from torch_dynemb.files.tensor_file import raw
from torch_dynemb.serving import whole_commits

if TYPE_CHECKING:
    from conftest import Package

INPUTS = features(32, 400, seed=5)


def new_trainer(
    package: Package,
    log: Path,
    *,
    segment_bytes: int = 64 << 20,
    rows: Literal["int8", "fp16"] | None = None,
) -> tuple[SmallModel, td.delta_log.DeltaLog]:
    """A model with the content of the package, and the log to which it publishes.

    Args:
        package: the live one that tests share.
        log: directory of the log.
        segment_bytes: from how many bytes on its files get no more batches.
        rows: form of the rows in the log.
    """
    model = small_model(seed=1, many=0)
    td.checkpoint.load(base_of(package.path), model)
    sink = td.delta_log.DirectorySink(log / "r000-of-001", segment_bytes=segment_bytes)
    # with what trainers resume from, which servers skip
    publisher = td.delta_log.DeltaLog(sink, resume=rows is None, rows=rows)
    publisher.attach(model, base=base_of(package.path))
    return model, publisher


def train(model: SmallModel, number: int, *, dense: bool = False) -> None:
    """A training step with new ids, after which others go.

    Args:
        model: it.
        number: of the step; steps of one number do the same.
        dense: whether the dense part changes, too.
    """
    model.zero_grad()
    score, others = model(*features(16, 100, seed=number))
    (score.sum() + others["pooled"].square().sum()).backward()
    model.bags.optimizer.step()
    model.bags.group.erase(number % 2, torch.arange(7 * number, 7 * number + 5))
    if dense:
        with torch.no_grad():
            model.top.weight -= 0.01
            model.scale += 1


def publish(publisher: td.delta_log.DeltaLog) -> int:
    """The number of the next commit, which is on the disk."""
    number = publisher.publish()
    publisher.flush()
    return number


def answer(model: SmallModel, inputs: tuple[Features, Tensor] = INPUTS) -> list[Tensor]:
    """What a frozen copy of the trainer's model gives now."""
    score, others = td.freeze(model)(*inputs)
    return [score, *others.values()]


def write_commit_of_two_ranks(
    package: Package, log: Path, ids: dict[str, Tensor], rows: dict[str, Tensor]
) -> None:
    """Writes the first commit of a log of two ranks.

    Of ``u`` each has half of the columns, in another order of the ids; of ``v`` each has some ids.

    Args:
        package: the live one that tests share.
        log: directory of the log.
        ids: int64 [n] of each table.
        rows: [n, dim] of each table.
    """
    with td.checkpoint.open(base_of(package.path)) as base:
        uuid = base.uuid
    backwards = torch.arange(len(ids["u"]) - 1, -1, -1)
    some = len(ids["v"]) // 3
    parts = [
        [(0, 4, ids["u"], rows["u"][:, :4]), (0, 4, ids["v"][:some], rows["v"][:some])],
        [
            (4, 4, ids["u"][backwards], rows["u"][backwards, 4:]),
            (0, 4, ids["v"][some:], rows["v"][some:]),
        ],
    ]
    for rank, of_rank in enumerate(parts):
        tables = [
            LoggedPart(f"bags.{name}", logged_table(rank, number, dim, first, columns))
            for number, ((name, dim), (first, columns, *_)) in enumerate(
                zip((("u", 8), ("v", 4)), of_rank, strict=True)
            )
        ]
        records = [of_tables(tables)]
        for table, (_, _, of_part, values) in enumerate(of_rank):
            tensors = {"id": of_part, "weight": values.contiguous()}
            records.append(Pieces.of(ROWS, table, of_tensors(tensors)))
        if rank == 1:
            records.append(Pieces.of(ERASE, 1, of_tensors({"id": torch.arange(3)})))
        head = Head(rank, 2, 0, uuid, 0, 1, 1, 0, 0)
        data, _ = encoded(head, records)
        sink = td.delta_log.DirectorySink(log / f"r{rank:03}-of-002")
        sink.append(raw(data), 1)
        sink.close()


class FailingChanges:
    """Has the n-th change of a table or of the dense part raise.

    With ``late``, the dense part raises after its change; a table is changed as a whole or not.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, late: bool) -> None:
        self._calls, self._fails_at = 0, 0
        for name, after in (("take", False), ("_copy", late)):
            change = self._wrapped(getattr(whole_commits, name), after)
            monkeypatch.setattr(whole_commits, name, change)

    def fail(self, call: int) -> None:
        """Has this call from now on raise, counted from 1; 0: none."""
        self._calls, self._fails_at = 0, call

    def _wrapped(self, change: Callable[[Any], None], late: bool) -> Callable[[Any], None]:
        def failing(of: Any) -> None:
            self._calls += 1
            fails = self._calls == self._fails_at
            if not fails or late:
                change(of)
            if fails:
                raise OSError(5, "injected")

        return failing


__all__ = [
    "INPUTS",
    "FailingChanges",
    "answer",
    "new_trainer",
    "publish",
    "train",
    "write_commit_of_two_ranks",
]
