"""State dicts of sharded tables by ``torch.save`` and ``torch.load(weights_only=True)``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_models import Kind, Shard, whole_tables
from pickled_state_steps import loaded_error, loaded_in_group, saved_and_loaded
from ranks import Ranks

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

KINDS = (
    Kind("rows", ("row_wise", "row_wise"), "times"),
    Kind("whole", ("table_wise", "table_wise"), "counted"),
    Kind("columns", ("column_wise", "column_wise")),
)
MOVED = Kind("moved", ("column_wise", "row_wise"))
NARROW = Kind("narrow", ("row_wise", "row_wise"), dtypes=("BF16", "BF16"))


def assert_same(found: list[list[Shard]], expected: list[list[Shard]]) -> None:
    tables, of_saved = whole_tables(found), whole_tables(expected)
    assert tables.keys() == of_saved.keys()
    for name, table in of_saved.items():
        assert torch.equal(tables[name].ids, table.ids)
        assert table.ids.numel() > 0
        assert tables[name].values.keys() == table.values.keys()
        for of, value in table.values.items():
            assert torch.equal(tables[name].values[of], value), (name, of)
        assert (tables[name].counts, tables[name].steps) == (table.counts, table.steps)


@pytest.mark.parametrize(
    ("kinds", "optimizer", "copied"),
    [(KINDS, "adagrad", False), (KINDS, "adam", True), (KINDS[:2], "8 bits", False)],
    ids=["adagrad", "a copy of adam", "8 bits"],
)
def test_a_state_dict_is_read_by_default(
    two_ranks: Ranks, tmp_path: Path, kinds: tuple[Kind, ...], optimizer: str, copied: bool
) -> None:
    results = two_ranks.run(saved_and_loaded, kinds, optimizer, str(tmp_path), copied)
    saved, loaded, saved_on, loaded_on = map(list, zip(*results, strict=True))
    assert_same(loaded, saved)
    assert_same(loaded_on, saved_on)


def test_it_loads_into_another_sharding(two_ranks: Ranks, tmp_path: Path) -> None:
    kinds = (MOVED, NARROW)
    results = two_ranks.run(saved_and_loaded, kinds, "adagrad", str(tmp_path), False)
    saved, loaded, *_ = map(list, zip(*results, strict=True))
    assert_same(loaded, saved)


def test_ranks_that_did_not_write_a_file_cannot_read_it(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(saved_and_loaded, KINDS[:1], "sgd", str(tmp_path), False)
    first, second = two_ranks.run(loaded_error, str(tmp_path / "rank0.pt"))
    assert first == ""
    assert "rank 0 of 2 wrote the file with a state dict of sharded tables, but rank 1 of 2" in (
        second
    )
    assert "torch_dynemb.checkpoint.save" in second
    alone = Ranks(1)
    try:
        (text,) = alone.run(loaded_error, str(tmp_path / "rank0.pt"))
        assert "rank 0 of 2 wrote the file" in text
        assert "but rank 0 of 1 reads it" in text
        (text,) = alone.run(loaded_error, str(tmp_path / "rank0.pt"), True)
        assert "the process group is missing: call torch.distributed.init_process_group" in text
    finally:
        alone.stop()


def test_entries_are_loaded_for_a_process_group(two_ranks: Ranks, tmp_path: Path) -> None:
    for entries, same in two_ranks.run(loaded_in_group, (NARROW, *KINDS), str(tmp_path)):
        assert entries > 4
        assert same
