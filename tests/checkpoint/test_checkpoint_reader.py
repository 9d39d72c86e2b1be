"""``checkpoint.open``: a checkpoint is read without a model, in batches, and nothing damaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_content import (
    ColumnShards,
    Content,
    agrees,
    group_content,
    same,
    saved_content,
    table_content,
    trained_model,
)
from torch import nn

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.checkpoint.saving import table_files
from torch_dynemb.files import scattered_file
from torch_dynemb.parts.saved_tables import SavedFile
from torch_dynemb.table.content import read_counts

pytestmark = pytest.mark.cpu_only("files, which are the same on any device")


@pytest.fixture(scope="module")
def model() -> nn.ModuleDict:
    return trained_model()


@pytest.fixture(scope="module")
def path(model: nn.ModuleDict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "saved"
    checkpoint.save(path, model, state={"epoch": 3, "seen": torch.arange(4)})
    return path


def small_blocks(monkeypatch: pytest.MonkeyPatch, block_bytes: int, file_bytes: int) -> None:
    """Saves in short blocks and files, as if tables were long."""
    monkeypatch.setattr(scattered_file, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(table_files, "FILE_BYTES", file_bytes)


def test_tables_are_described(path: Path, model: nn.ModuleDict) -> None:
    with checkpoint.open(path) as saved:
        assert (saved.kind, saved.ranks, len(saved.uuid)) == ("full", 1, 32)
        assert list(saved.tables) == [f"tables.{n}" for n in ("ads", "empty", "items", "users")]
        users, items = saved.tables["tables.users"], saved.tables["tables.items"]
    group = model["tables"].group
    assert (users.embedding_dim, users.dtype, users.ids) == (12, torch.float32, group.size(0))
    assert (items.embedding_dim, items.dtype, items.ids) == (8, torch.bfloat16, group.size(1))
    assert users.scores == ("step", "timestamp", "frequency")  # the policy's, and what breaks ties
    assert users.policy["capacity"] == 5000
    assert users.optimizer == td.Adam(lr=0.1, row_steps=True).description()
    assert users.hyper["lr"] == [0.1]
    assert (users.step, users.now) == (3, 102)
    assert users.seed == int(group.index.meta[0, 0])
    assert [(of.name, of.per_row) for of in users.state_tensors] == [
        ("exp_avg", False),
        ("exp_avg_sq", False),
        ("step", True),
    ]
    assert users.row_bytes == 8 + 3 * 8 + 4 * 12 + 2 * 4 * 12 + 4


@pytest.mark.parametrize("size", [7, 10_000])
def test_batches_are_what_the_tables_have(path: Path, model: nn.ModuleDict, size: int) -> None:
    group = model["tables"].group
    found = saved_content(path, size)
    for number, name in enumerate(group.names[:3]):
        assert agrees(found[f"tables.{name}"], group_content(group, number))
    assert found["tables.empty"].ids.numel() == 0


def test_counts_sketch_dense_part_and_state(path: Path, model: nn.ModuleDict) -> None:
    group = model["tables"].group
    with checkpoint.open(path) as saved:
        items, ads = saved.tables["tables.items"], saved.tables["tables.ads"]
        counts = {
            int(id): int(count)
            for batch in items.counts(10)
            for id, count in zip(batch.ids, batch.counts, strict=True)
        }
        waiting = read_counts(group.tables, 1)
        assert waiting is not None
        assert counts == dict(zip(waiting.ids.tolist(), waiting.counts.tolist(), strict=True))
        assert len(counts) == items.counted > 10
        sketch = ads.sketch()
        assert sketch is not None
        assert torch.equal(sketch.reshape(-1), group.index.sketch)
        assert int(sketch.sum()) > 0
        assert items.sketch() is None
        assert list(ads.counts(10)) == []
        assert same(saved.dense(), dict(model["top"].state_dict(prefix="top.")))
        assert same(saved.state, {"epoch": 3, "seen": torch.arange(4)})


def test_only_what_is_asked_for_is_read(path: Path) -> None:
    with checkpoint.open(path) as saved:
        table = saved.tables["tables.users"]
        batch = next(table.batches(50, state=False, scores=False))
        assert (batch.state, batch.scores) == ({}, {})
        whole = next(table.batches(50))
        assert tuple(whole.scores) == ("step", "timestamp", "frequency")
        assert torch.equal(batch.ids, whole.ids)
        assert torch.equal(batch.ids, next(table.id_batches(50)))


@pytest.mark.parametrize("block_bytes", [512, 5000])
def test_files_and_blocks_of_any_length(
    model: nn.ModuleDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    small_blocks(monkeypatch, block_bytes, 9000)
    checkpoint.save(tmp_path / "saved", model)
    with checkpoint.open(tmp_path / "saved") as saved:
        assert len(saved.manifest.tables["tables.users"].parts[0].rows) > 3
        saved.verify()
    group = model["tables"].group
    for size in (1, 64):
        found = saved_content(tmp_path / "saved", size)
        for number, name in enumerate(group.names[:3]):
            assert agrees(found[f"tables.{name}"], group_content(group, number))


def test_column_shards_are_put_together(tmp_path: Path) -> None:
    shards = ColumnShards([8, 4], td.PartialRowWiseAdam(lr=0.1))
    for ids in (torch.arange(50), torch.arange(20, 90)):
        shards.train_on(ids)
    shards.shards[1](torch.arange(5)).sum().backward()  # the second shard is a step ahead
    shards.shards[1].optimizer.step()
    checkpoint.save(tmp_path / "saved", shards)
    (found,) = saved_content(tmp_path / "saved", 13).values()
    parts = [group_content(shard.group, 0) for shard in shards.shards]  # type: ignore[arg-type]
    assert torch.equal(found.ids, parts[0].ids)
    assert torch.equal(found.rows, torch.cat([part.rows for part in parts], 1))
    by_element = [part.state["exp_avg"] for part in parts]
    assert torch.equal(found.state["exp_avg"], torch.cat(by_element, 1))
    first, second = (part.state["exp_avg_sq"].double() for part in parts)
    assert not torch.equal(first, second)
    torch.testing.assert_close(
        found.state["exp_avg_sq"], ((2 * first + second) / 3).float(), rtol=1e-6, atol=0
    )


def test_steps_of_column_shards_are_the_most_and_8_bit_state_stays_as_it_is(tmp_path: Path) -> None:
    optimizer = td.Adam(lr=0.1, row_steps=True, state_dtype=torch.uint8)
    shards = ColumnShards([4, 8], optimizer)
    shards.train_on(torch.arange(30))
    shards.shards[1](torch.arange(5)).sum().backward()
    shards.shards[1].optimizer.step()
    checkpoint.save(tmp_path / "saved", shards)
    (found,) = saved_content(tmp_path / "saved", 100).values()
    assert found.state["step"][:, 0].tolist() == [2] * 5 + [1] * 25
    parts = [group_content(shard.group, 0) for shard in shards.shards]  # type: ignore[arg-type]
    together = torch.cat([part.state["exp_avg"] for part in parts], 1)
    assert together.dtype == torch.uint8
    assert torch.equal(found.state["exp_avg"], together)


# -- damage --------------------------------------------------------------------------------------


def files_of(path: Path) -> Iterator[SavedFile]:
    with checkpoint.open(path) as saved:
        yield from saved.manifest.files()


def read_all(path: Path) -> list[Content]:
    with checkpoint.open(path) as saved:
        saved.dense()
        _ = saved.state
        return [table_content(table, 50) for table in saved.tables.values()]


def assert_damaged(path: Path, file: SavedFile, at: int, read: Callable[[Path], object]) -> None:
    """A flipped bit of a file is found, and named."""
    with (path / file.path).open("r+b") as opened:

        def flip() -> None:
            opened.seek(at)
            value = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([value ^ 4]))
            opened.flush()

        flip()
        with pytest.raises(checkpoint.DamagedFileError, match=Path(file.path).name):
            read(path)
        flip()


def verify(path: Path) -> None:
    with checkpoint.open(path) as saved:
        saved.verify()


def test_a_flipped_bit_of_any_block_is_found(
    model: nn.ModuleDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 4096, 1 << 30)
    path = tmp_path / "saved"
    checkpoint.save(path, model, state={"seen": torch.arange(4)})
    blocks = 0
    for file in files_of(path):
        for number in range(len(file.crc32c)):
            assert_damaged(path, file, min(number * 4096 + 17, file.bytes - 1), verify)
            blocks += 1
    assert blocks > 30
    verify(path)


def test_nothing_is_read_of_a_damaged_file(model: nn.ModuleDict, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    checkpoint.save(path, model, state={"seen": torch.arange(4)})
    files = list(files_of(path))
    # places of ids do not matter, nor whether there are any
    read = [file for file in files if file.path.split("/")[1] not in ("groups", "tables.empty")]
    assert len(read) == len(files) - 2
    for file in read:
        for at in (3, 20, file.bytes // 2, file.bytes - 1):
            assert_damaged(path, file, at, read_all)
    assert len(read_all(path)) == 4


def test_no_value_of_a_damaged_block_is_given_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 4096, 1 << 30)
    module = td.DynamicEmbedding(64, name="t", optimizer=td.SGD(lr=0.1))
    rows = torch.randn(200, 64)
    module.group.insert_or_assign(0, torch.arange(200), rows)
    path = tmp_path / "saved"
    checkpoint.save(path, module)
    (file,) = checkpoint.open(path).manifest.tables["embedding"].parts[0].rows
    data = bytearray((path / file.path).read_bytes())
    data[-1] ^= 0x40
    (path / file.path).write_bytes(data)
    last_block = (file.bytes - 1) // 4096 * 4096
    damaged = -(-(file.bytes - last_block) // 256)  # rows with bytes in it
    seen = []
    with checkpoint.open(path) as saved:
        batches = saved.tables["embedding"].batches(1)
        with pytest.raises(checkpoint.DamagedFileError, match=r"checksum .* expected"):
            seen.extend(batches)
    assert len(seen) == 200 - damaged
    assert all(torch.equal(batch.rows[0], rows[int(batch.ids)]) for batch in seen)


def test_missing_short_and_foreign_files(path: Path, tmp_path: Path) -> None:
    with checkpoint.open(path) as saved:
        name = saved.manifest.tables["tables.users"].parts[0].rows[0].path
    (tmp_path / "saved").mkdir()
    for file in path.rglob("*"):
        if file.is_file():
            target = tmp_path / "saved" / file.relative_to(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    file = tmp_path / "saved" / name
    data = file.read_bytes()
    for damage, said in (
        (lambda: file.write_bytes(data[:-1]), "bytes, expected"),
        (lambda: file.write_bytes(data + b"x"), "bytes, expected"),
        (file.unlink, "is missing"),
    ):
        damage()
        with checkpoint.open(tmp_path / "saved") as saved:
            for read in (saved.verify, lambda: list(saved.tables["tables.users"].batches(100))):
                with pytest.raises(checkpoint.DamagedFileError, match=f"{file.name}.*{said}"):
                    read()
            assert len(list(saved.tables["tables.ads"].batches(100))) > 0  # which is as it was


def test_a_checkpoint_that_is_replaced_while_it_is_read(
    model: nn.ModuleDict, tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    checkpoint.save(path, model)
    saved = checkpoint.open(path)
    table = saved.tables["tables.users"]
    batches = table.batches(10)
    first = next(batches)
    other = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
    checkpoint.save(path, other)
    rest = list(batches)  # of files that are open, and are there as long
    assert sum(batch.ids.numel() for batch in [first, *rest]) == table.ids
    for read in (lambda: list(table.batches(10)), saved.verify, saved.dense):
        with pytest.raises(RuntimeError, match="was replaced or removed while it was read"):
            read()
    saved.close()


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a checkpoint"):
        checkpoint.open(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="is not a checkpoint"):
        checkpoint.open(tmp_path)
    with pytest.raises(TypeError, match="path is 3"):
        checkpoint.open(3)  # type: ignore[arg-type]


def test_another_default_device_is_not_asked(model: nn.ModuleDict, tmp_path: Path) -> None:
    """As a program has that trains on a GPU; tensors of "meta" have no values at all."""
    checkpoint.save(tmp_path / "before", model, state={"seen": torch.arange(4)})
    expected = saved_content(tmp_path / "before")
    twin = trained_model(steps=1, ids=10)
    with torch.device("meta"):
        checkpoint.save(tmp_path / "saved", model, state={"epoch": 3})
        checkpoint.reshard(tmp_path / "saved", tmp_path / "parts", parts=2, columns=2)
        checkpoint.export(tmp_path / "saved", tmp_path / "npz", file_format="npz")
        for name in ("saved", "parts"):  # places and all, and ids and values alone
            report = checkpoint.load(tmp_path / name, twin)
            assert [table.exact for table in report.tables.values()] == [name == "saved"] * 4
        with checkpoint.open(tmp_path / "before") as saved:
            saved.verify()
            assert saved.dense()["top.bias"].tolist() == model["top"].bias.tolist()
            assert saved.state["seen"].tolist() == [0, 1, 2, 3]
            users, ads, items = (saved.tables[f"tables.{n}"] for n in ("users", "ads", "items"))
            batches = list(users.batches(50))
            counted = list(items.counts(50))
            sketch = ads.sketch()
    assert torch.equal(
        torch.cat([of.ids for of in batches]).sort().values, expected[users.name].ids
    )
    assert sum(of.counts.sum() for of in counted) == sum(expected[items.name].counts.values())
    assert same(sketch, expected[ads.name].sketch)
    checkpoint.save(tmp_path / "after", twin)
    after = saved_content(tmp_path / "after")
    assert all(same(after[name], expected[name]) for name in expected)


def test_wrong_arguments(path: Path) -> None:
    with checkpoint.open(path) as saved:
        table = saved.tables["tables.users"]
        for read in (table.batches, table.id_batches, table.counts):
            with pytest.raises(ValueError, match="size is 0, expected at least 1"):
                read(0)
        with pytest.raises(TypeError, match="state is 1"):
            table.batches(5, state=1)  # type: ignore[arg-type]


# -- files ----------------------------------------------------------------------------


def open_files(folder: Path) -> int:
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{entry}").startswith(str(folder))
        except FileNotFoundError:
            continue
    return found


def test_files_are_closed(path: Path) -> None:
    saved = checkpoint.open(path)
    table = saved.tables["tables.users"]
    assert open_files(path) == 0
    batches = table.batches(50)
    next(batches)
    assert open_files(path) == 1
    list(batches)
    assert open_files(path) == 0
    batches = table.batches(50)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert open_files(path) == 0
    batches = table.batches(50)
    next(batches)
    saved.close()
    assert open_files(path) == 0
    for read in (
        lambda: next(batches),
        lambda: next(table.batches(50)),
        saved.dense,
        saved.verify,
        lambda: saved.state,
    ):
        with pytest.raises(ValueError, match="is closed"):
            read()
    assert open_files(path) == 0
