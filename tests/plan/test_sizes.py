"""Bytes that a plan names are those that tables take."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import torch_dynemb as td
from torch_dynemb.plan.choices import choices, needed, row_formats, suggested
from torch_dynemb.plan.counting import IdCounter
from torch_dynemb.plan.growth import DistinctIds
from torch_dynemb.plan.sizes import (
    DTYPES,
    OPTIMIZERS,
    STATE_DTYPES,
    PlannedRow,
    in_memory,
    most_ids,
    on_disk,
)
from torch_dynemb.policy.policy import Policy

pytestmark = pytest.mark.cpu_only("compares with tables on the host")

IDS = 20_000


def table(row: PlannedRow, **options: object) -> td.DynamicEmbedding:
    module = td.DynamicEmbedding(
        row.dim, dtype=DTYPES[row.dtype], optimizer=row.optimizer_config(), **options
    )
    module.group.insert(0, torch.arange(IDS) * 7919)
    return module


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_and_state_of_every_optimizer(optimizer: str) -> None:
    for dtype, state_dtype in (("float32", "float32"), ("bfloat16", "bfloat16")):
        try:
            row = PlannedRow(12, optimizer, dtype, state_dtype)
        except ValueError:
            options = {of.name for of in dataclasses.fields(OPTIMIZERS[optimizer])}
            assert "state_dtype" not in options
            continue
        used = table(row).memory()
        planned = in_memory(row, IDS, ranks=1)
        assert (planned.rows, planned.state) == (used["rows"], used["state"])
        assert used["index"] <= planned.index <= 1.5 * used["index"]
        assert planned.memory == planned.rows + planned.state + planned.index


def test_a_capacity_takes_what_is_planned() -> None:
    row = PlannedRow(16, "adam", "float32", "uint8")
    policy = Policy(score="frequency", capacity=IDS)
    used = table(row, policy=policy).memory()
    planned = in_memory(row, IDS, ranks=1, policy=policy)
    assert used["total"] == pytest.approx(planned.memory, rel=0.01)
    fitting = most_ids(row, used["total"], ranks=1, policy=policy)
    assert fitting == pytest.approx(IDS, rel=0.01)
    assert most_ids(row, used["total"], ranks=4, policy=policy) == 4 * fitting


def test_what_admission_counts() -> None:
    row = PlannedRow(8, "sgd", "float32", "float32")
    module = td.DynamicEmbedding(
        8, optimizer=row.optimizer_config(), policy=Policy(admission=td.AdmitFrequent(2))
    )
    module(torch.arange(IDS)).sum().backward()
    module.optimizer.step()
    planned = in_memory(row, 0, ranks=1, policy=module.table.policy, counted=IDS)
    assert planned.rows == 0
    used = module.memory()["index"]
    assert used <= planned.index * 1.01
    assert planned.index <= 1.5 * used


def test_files_take_what_is_planned(tmp_path: Path) -> None:
    row = PlannedRow(32, "adagrad", "float32", "float32")
    storage = td.SSDStore(tmp_path / "rows", cache="2000 rows", segment="1MiB", disk="64MiB")
    module = td.DynamicEmbedding(32, optimizer=row.optimizer_config(), storage=storage)
    for ids in torch.arange(IDS).split(1000):
        module(ids).sum().backward()
        module.optimizer.step()
    planned = on_disk(row, IDS, 2000, ranks=1)
    used = module.memory()
    assert (used["rows"], used["state"]) == (planned.rows, planned.state)
    assert used["index"] <= planned.index <= 1.5 * used["index"]
    stats = module.group.usage.storage()
    assert stats is not None
    td.checkpoint.save_snapshot(module, "end")  # now the files have every row
    assert 0.7 * planned.disk <= module.group.usage.storage().disk_bytes <= 2 * planned.disk


def test_ranks_share_the_ids() -> None:
    row = PlannedRow(8, "adam", "float32", "float32")
    one, eight = (in_memory(row, 8000, ranks=ranks) for ranks in (1, 8))
    assert eight.rows * 8 == one.rows
    assert eight.state * 8 == one.state


def test_formats_to_choose_from() -> None:
    def names(*arguments: object) -> list[tuple[str, str]]:
        return [(row.dtype, row.state_dtype) for row in row_formats(8, *arguments)]

    precise, low = ("float32", "float32"), ("bfloat16", "float32")
    assert names("adam", None, None) == [
        precise,
        low,
        ("bfloat16", "bfloat16"),
        ("bfloat16", "uint8"),
    ]
    assert names("adagrad", None, None) == [precise, low, ("bfloat16", "bfloat16")]
    assert names("rowwise-adagrad", None, None) == [precise, low]
    assert names("adam", "float16", "uint8") == [("float16", "uint8")]
    assert set(STATE_DTYPES) >= {state for _, state in names("adam", None, None)}
    with pytest.raises(ValueError, match="state_dtype is uint8, but sgd keeps no value"):
        row_formats(8, "sgd", None, "uint8")
    with pytest.raises(ValueError, match=r"Adagrad: state_dtype is torch\.uint8"):
        row_formats(8, "adagrad", None, "uint8")
    with pytest.raises(ValueError, match="at most 16777216"):
        row_formats(1 << 30, "sgd", None, None)


@pytest.fixture(scope="module")
def need() -> object:
    counter = IdCounter()
    ids = torch.arange(1000).repeat_interleave(torch.arange(1000) % 10 + 1)
    counter.add(ids, torch.arange(len(ids)), lines=len(ids))
    return needed([counter.counts()], DistinctIds(1000, 1500, 2000))


@pytest.mark.parametrize(
    ("memory", "how", "dtype", "state"),
    [
        (10**9, "all ids", "float32", "float32"),
        (900_000, "all ids", "bfloat16", "bfloat16"),
        (560_000, "ids seen twice", "bfloat16", "uint8"),
        (50_000, "evict the rarest", "bfloat16", "uint8"),
    ],
)
def test_the_first_choice_that_fits(
    need: object, memory: int, how: str, dtype: str, state: str
) -> None:
    found = choices(need, row_formats(64, "adam", None, None), ranks=1, memory=memory)
    best = suggested(found)
    assert best is not None
    assert (best.how, best.row.dtype, best.row.state_dtype) == (how, dtype, state)
    assert best.bytes.memory <= memory
    assert eval(best.policy, {"td": td}) is not None  # the code is Python


def test_nothing_fits_or_nothing_is_known(need: object) -> None:
    rows = row_formats(64, "adam", None, None)
    assert suggested(choices(need, rows, ranks=1, memory=10)) is None
    unknown = choices(need, rows, ranks=1, memory=None)
    assert suggested(unknown) is None
    assert {choice.fits for choice in unknown} == {None}
