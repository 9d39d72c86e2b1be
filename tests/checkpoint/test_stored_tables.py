"""Checkpoints of tables whose rows lie in a store: streamed to and from the same files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_content import ColumnShards, saved_content
from checkpoint_content import same as same_values
from damage import copied, flip
from dict_store import DictStore, put_in_store
from torch import Tensor
from whole_group import check_owners
from whole_model import WholeModel, content, same, save_trained

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.table.content import read_content, read_counts

pytestmark = pytest.mark.cpu_only("stores are read by the CPU")


class Stored(WholeModel):
    """The model, whose rows lie in stores."""

    def __init__(self, *, other: bool = False, slabs: list[int] | None = None) -> None:
        super().__init__(other=other)
        self.stores: list[DictStore] = [
            put_in_store(self.tables.group, slabs),
            put_in_store(self.bag.group),
        ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained(tmp_path_factory.mktemp("stored") / "trained")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What other tables have before a load."""
    model = WholeModel()
    model.train_steps(range(7, 9))
    path = tmp_path_factory.mktemp("stored") / "before"
    checkpoint.save(path, model)
    return path


def groups(model: WholeModel) -> Iterator[tuple[td.TableGroup, int]]:
    for group in (model.tables.group, model.bag.group):
        for table in range(len(group.config.tables)):
            yield group, table


def live(model: WholeModel) -> list[tuple[object, ...]]:
    """Everything that the tables have, in the order of the ids."""
    return [
        (read_content(group.tables, table), read_counts(group.tables, table))
        for group, table in groups(model)
    ]


@pytest.mark.parametrize("slabs", [None, [1]], ids=["all rows", "rows of a slab"])
def test_a_stored_model_is_loaded_and_saved_bit_for_bit(
    trained: Path, tmp_path: Path, slabs: list[int] | None
) -> None:
    stored, twin = Stored(slabs=slabs), WholeModel()
    report = checkpoint.load(trained, stored)
    assert all(table.exact for table in report.tables.values())
    checkpoint.save(tmp_path / "streamed", stored)
    assert same_values(saved_content(tmp_path / "streamed"), saved_content(trained))
    assert checkpoint.load(tmp_path / "streamed", twin).tables == report.tables
    expected = WholeModel()
    checkpoint.load(trained, expected)
    assert same(content(twin), content(expected))
    for model in (twin, expected):
        model.train_steps(range(3, 5))
    assert same(content(twin), content(expected))


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_a_load_gives_what_tables_in_memory_get(
    trained: Path, before: Path, other: bool, filled: bool
) -> None:
    stored, plain = Stored(other=other), WholeModel(other=other)
    for path in (before, trained) if filled else (trained,):
        reports = [checkpoint.load(path, model).tables for model in (stored, plain)]
    assert reports[0] == reports[1]
    assert same_values(live(stored), live(plain))
    for group, table in groups(stored):
        check_owners(group)
        free = torch.arange(1000, 1100)  # on rows that others have had
        group.insert(table, free)
        twin = next(of for of, _ in groups(plain) if of.names == group.names)
        twin.insert(table, free)
        assert torch.equal(group.read(table, free), twin.read(table, free))


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_what_a_failed_load_has_written_is_never_found(
    trained: Path, before: Path, monkeypatch: pytest.MonkeyPatch, other: bool, filled: bool
) -> None:
    """Neither for new ids nor after another load."""
    monkeypatch.setattr("torch_dynemb.checkpoint.reading.saved_rows.PIECE_BYTES", 500)
    stored, plain = Stored(other=other), WholeModel(other=other)
    if filled:
        checkpoint.load(before, stored)
    for store in stored.stores:
        store.room = 30
    with pytest.raises(RuntimeError, match="no room on the disk"):
        checkpoint.load(trained, stored)
    written = sum(len(store.rows) for store in stored.stores)
    assert written > 0
    for store in stored.stores:
        store.room = 1 << 40
    ids = torch.arange(60)
    for (group, table), (twin, _) in zip(groups(stored), groups(plain), strict=True):
        assert group.size(table) == 0
        for of in (group, twin):
            of.insert(table, ids.repeat(3))
        assert torch.equal(group.read(table, ids), twin.read(table, ids))
    for model in (stored, plain):
        checkpoint.load(trained, model)
    assert same_values(live(stored), live(plain))


def test_a_damaged_file_leaves_no_ids(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "damaged")
    file = max((folder / "tables.sketched").glob("r*.safetensors"))
    flip(file.stat().st_size - 5)(file)
    stored = Stored()
    with pytest.raises(checkpoint.DamagedFileError, match="sketched"):
        checkpoint.load(folder, stored)
    assert sum(stored.tables.group.sizes().values()) == 0
    checkpoint.load(trained, stored)
    plain = WholeModel()
    checkpoint.load(trained, plain)
    assert same_values(live(stored), live(plain))


@pytest.mark.parametrize("dims", [[12], [4, 8]])
def test_column_shards_become_stored_tables(tmp_path: Path, dims: list[int]) -> None:
    optimizer = td.PartialRowWiseAdam(lr=0.1)
    source = ColumnShards([8, 4], optimizer)
    ids = torch.arange(0, 90, 3)
    source.train_on(ids)
    checkpoint.save(tmp_path / "shards", source)
    stored, plain = ColumnShards(dims, optimizer), ColumnShards(dims, optimizer)
    for shard in stored.shards:
        put_in_store(shard.group)
    for model in (stored, plain):
        checkpoint.load(tmp_path / "shards", model)
    for one, other in zip(stored.shards, plain.shards, strict=True):
        assert same_values(
            list(read_content(one.group.tables, 0)), list(read_content(other.group.tables, 0))
        )
    checkpoint.save(tmp_path / "again", stored)
    assert same_values(saved_content(tmp_path / "again"), saved_content(tmp_path / "shards"))


def test_rows_are_streamed_in_bounded_pieces(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch_dynemb.checkpoint.reading.saved_rows as reading
    import torch_dynemb.checkpoint.saving.table_source as saving

    for module in (reading, saving):
        monkeypatch.setattr(module, "PIECE_BYTES", 500)
    for other in (False, True):
        stored = Stored(other=other)
        checkpoint.load(trained, stored)
        for store in stored.stores:
            store.most_read = 0
        checkpoint.save(tmp_path / f"streamed {other}", stored)
        for store in stored.stores:
            assert 0 < store.most_read <= 500 // 8  # the smallest row has 4 columns of 2 bytes
            assert 0 < store.most_written <= 500 // 32


def test_an_asynchronous_save_of_stored_tables_is_refused(trained: Path, tmp_path: Path) -> None:
    stored = Stored()
    checkpoint.load(trained, stored)
    with pytest.raises(RuntimeError, match=r"asynchronous=True.*'scored'.*save without asynchr"):
        checkpoint.save(tmp_path / "later", stored, asynchronous=True)
    assert not (tmp_path / "later").exists()
    checkpoint.save(tmp_path / "now", stored)


def test_a_frozen_copy_has_the_rows_of_the_store(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, plain = Stored(), WholeModel()
    for model in (stored, plain):
        checkpoint.load(trained, model)
        model.bag.group.insert(0, torch.arange(200, 210))  # that nobody has written
    ids = torch.cat([torch.arange(70), torch.arange(200, 212)])[:, None]

    def outputs(model: WholeModel) -> Tensor:
        frozen = td.freeze(model)
        batch = dict.fromkeys(model.tables.feature_names, ids % 64)
        return torch.cat([frozen.tables(batch), frozen.bag(ids)], 1)

    assert torch.equal(outputs(stored), outputs(plain))
    from torch_dynemb import ops

    monkeypatch.setattr(ops, "available_memory", lambda: 10)
    with pytest.raises(RuntimeError, match=r"freeze: .* takes \d+ bytes, but 10 bytes"):
        td.freeze(stored)
