"""Checkpoints of tables with rows in a store: streamed to and from the same files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_content import ColumnShards, saved_content
from checkpoint_content import same as same_values
from damage import copied, flip
from record_dict import LEAST, RecordDict, stored
from torch import Tensor
from whole_group import check_owners
from whole_model import WholeModel, content, same, save_trained

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.table.content import read_content, read_counts

pytestmark = pytest.mark.cpu_only("stores are read by the CPU")


class Stored(WholeModel):
    """The model, with rows in stores beneath caches of the least size.

    Args:
        other: see :class:`WholeModel`.
        only: the only table with rows in a store; None: all tables.
        folder: of stores on a disk; None: they are dicts.
    """

    def __init__(
        self, *, other: bool = False, only: str | None = None, folder: Path | None = None
    ) -> None:
        tables, bag = RecordDict(), RecordDict()
        where: list[td.ExternalStore | td.SSDStore] = [stored(tables), stored(bag)]
        if folder is not None:
            on_disk = td.SSDStore(folder, cache=LEAST, segment=1 << 16)
            where = [on_disk.within("tables"), on_disk.within("bag")]
        storage = dict.fromkeys(("scored", "counted", "sketched"), where[0]) | {"bag": where[1]}
        names = storage if only is None else [only]
        super().__init__(other=other, storage={name: storage[name] for name in names})
        self.stores = [tables, bag]


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


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("only", [None, "sketched", "counted"])
def test_a_stored_model_is_loaded_and_saved_bit_for_bit(
    trained: Path, tmp_path: Path, only: str | None, on_disk: bool
) -> None:
    model = Stored(only=only, folder=tmp_path / "one" if on_disk else None)
    again = Stored(only=only, folder=tmp_path / "two" if on_disk else None)
    plain, twin = WholeModel(), WholeModel()
    report = checkpoint.load(trained, model)
    # where one of two tables of a dim is stored, the rows of the other are numbered anew
    exact = {name: only != "counted" or name == "bag" for name in report.tables}
    assert {name: table.exact for name, table in report.tables.items()} == exact
    checkpoint.save(tmp_path / "streamed", model)
    assert same_values(saved_content(tmp_path / "streamed"), saved_content(trained))
    assert all(of.exact for of in checkpoint.load(tmp_path / "streamed", again).tables.values())
    checkpoint.load(tmp_path / "streamed", twin)
    checkpoint.load(trained, plain)
    if only != "counted":
        assert same(content(twin), content(plain))
    for of in (model, again, twin, plain):
        of.train_steps(range(3, 6))
    assert same_values(live(model), live(again))
    if only != "counted":
        assert same_values(live(model), live(plain))
        assert same_values(live(twin), live(plain))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_reads_each_stored_row_once(tmp_path: Path, asynchronous: bool) -> None:
    """With its state, of which AMSGrad has three tensors."""
    storage = td.SSDStore(tmp_path / "rows", cache="16 rows", segment="64KiB")
    table = td.DynamicEmbedding(16, optimizer=td.AMSGrad(lr=0.1), storage=storage)
    for first in range(0, 400, 40):
        table(torch.arange(40) + first).sum().backward()
        table.optimizer.step()
    tiers = table.group.tables.tiers
    assert tiers is not None
    before = tiers.stats()
    checkpoint.save(tmp_path / "saved", table, asynchronous=asynchronous).wait()
    assert 300 < tiers.stats().reads - before.reads <= 400


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_a_load_gives_what_tables_in_memory_get(
    trained: Path, before: Path, tmp_path: Path, other: bool, filled: bool, on_disk: bool
) -> None:
    model = Stored(other=other, folder=tmp_path if on_disk else None)
    plain = WholeModel(other=other)
    for path in (before, trained) if filled else (trained,):
        reports = [checkpoint.load(path, of).tables for of in (model, plain)]
    assert reports[0] == reports[1]
    assert same_values(live(model), live(plain))
    new = torch.arange(1000, 1100)  # on rows that others have had
    for (group, table), (twin, _) in zip(groups(model), groups(plain), strict=True):
        check_owners(group)
        for of in (group, twin):
            of.insert(table, new)
        assert torch.equal(group.read(table, new), twin.read(table, new))
    for of in (model, plain):
        of.train_steps(range(3, 6))
    assert same_values(live(model), live(plain))


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_what_a_failed_load_has_written_is_never_found(
    trained: Path, before: Path, monkeypatch: pytest.MonkeyPatch, other: bool, filled: bool
) -> None:
    """Neither for new ids nor after another load."""
    monkeypatch.setattr("torch_dynemb.checkpoint.reading.saved_rows.PIECE_BYTES", 500)
    model, plain = Stored(other=other), WholeModel(other=other)
    if filled:
        checkpoint.load(before, model)
    for store in model.stores:
        store.room = 30
    with pytest.raises(RuntimeError, match="no room on the disk"):
        checkpoint.load(trained, model)
    assert any(store.room < 30 for store in model.stores)
    for store in model.stores:
        store.room = 1 << 40
    ids = torch.arange(60)
    for (group, table), (twin, _) in zip(groups(model), groups(plain), strict=True):
        assert group.size(table) == 0
        for of in (group, twin):
            of.insert(table, ids.repeat(3))
        assert torch.equal(group.read(table, ids), twin.read(table, ids))
    for of in (model, plain):
        checkpoint.load(trained, of)
    assert same_values(live(model), live(plain))


def test_a_damaged_file_leaves_no_ids(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "damaged")
    file = max(folder.glob("*/tables.sketched/r*.safetensors"))
    flip(file.stat().st_size - 5)(file)
    model, plain = Stored(), WholeModel()
    with pytest.raises(checkpoint.DamagedFileError, match="sketched"):
        checkpoint.load(folder, model)
    assert sum(model.tables.group.sizes().values()) == 0
    for of in (model, plain):
        checkpoint.load(trained, of)
    assert same_values(live(model), live(plain))


@pytest.mark.parametrize("dims", [[12], [4, 8]])
def test_column_shards_become_stored_tables(tmp_path: Path, dims: list[int]) -> None:
    optimizer = td.PartialRowWiseAdam(lr=0.1)
    source = ColumnShards([8, 4], optimizer)
    source.train_on(torch.arange(0, 90, 3))
    checkpoint.save(tmp_path / "shards", source)
    plain = ColumnShards(dims, optimizer)
    model = ColumnShards(dims, optimizer, storage=[stored() for _ in dims])
    for of in (model, plain):
        checkpoint.load(tmp_path / "shards", of)
        of.train_on(torch.arange(0, 300, 5))
    for one, other in zip(model.shards, plain.shards, strict=True):
        assert same_values(
            list(read_content(one.group.tables, 0)), list(read_content(other.group.tables, 0))
        )
    checkpoint.save(tmp_path / "stored", model)
    checkpoint.save(tmp_path / "plain", plain)
    assert same_values(saved_content(tmp_path / "stored"), saved_content(tmp_path / "plain"))


def test_rows_are_streamed_in_bounded_pieces(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_dynemb.checkpoint.reading.saved_rows.PIECE_BYTES", 500)
    monkeypatch.setattr("torch_dynemb.rows.read.ROWS_BYTES", 500)
    for other in (False, True):
        model = Stored(other=other)
        checkpoint.load(trained, model)
        for store in model.stores:
            assert 0 < store.most_written <= 500 // 32
            store.most_read = 0
        checkpoint.save(tmp_path / f"streamed {other}", model)
        for store in model.stores:
            assert 0 < store.most_read <= 500 // 8  # the smallest row has 4 columns of 2 bytes


def test_an_asynchronous_save_of_an_external_store_is_refused(
    trained: Path, tmp_path: Path
) -> None:
    model = Stored()
    checkpoint.load(trained, model)
    with pytest.raises(
        RuntimeError,
        match=r"asynchronous=True.*'scored'.*ExternalStore cannot pin.*save without asynchr",
    ):
        checkpoint.save(tmp_path / "later", model, asynchronous=True)
    assert not (tmp_path / "later").exists()
    checkpoint.save(tmp_path / "now", model)


def test_a_frozen_copy_has_the_rows_of_the_store(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = Stored(), WholeModel()
    for of in (model, plain):
        checkpoint.load(trained, of)
        of.bag.group.insert(0, torch.arange(200, 210))  # unwritten rows
    ids = torch.cat([torch.arange(70), torch.arange(200, 212)])[:, None]

    def outputs(of: WholeModel) -> Tensor:
        frozen = td.freeze(of)
        batch = dict.fromkeys(of.tables.feature_names, ids % 64)
        return torch.cat([frozen.tables(batch), frozen.bag(ids)], 1)

    assert torch.equal(outputs(model), outputs(plain))
    monkeypatch.setattr("torch_dynemb.ops.available_memory", lambda: 10)
    with pytest.raises(RuntimeError, match=r"freeze: .* takes \d+ bytes, but 10 bytes"):
        td.freeze(model)
