"""``checkpoint.reshard``: the same content as other ranks would have saved it."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_content import (
    ColumnShards,
    RowPart,
    group_content,
    same,
    saved_content,
    trained_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torch_dynemb as td
from torch_dynemb import checkpoint, ops
from torch_dynemb.checkpoint.saving import table_files
from torch_dynemb.files import scattered_file
from torch_dynemb.files.checksummed_files import ChecksummedReader
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.tensor_file import TensorShape

pytestmark = pytest.mark.cpu_only("files, which are the same on any device")
RESHARD = sys.modules["torch_dynemb.checkpoint.tools.reshard"]


@pytest.fixture(scope="module")
def model() -> nn.ModuleDict:
    return trained_model()


@pytest.fixture(scope="module")
def path(model: nn.ModuleDict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "saved"
    checkpoint.save(path, model, state={"epoch": 3, "seen": torch.arange(4)})
    return path


def dense_files(path: Path) -> list[object]:
    with checkpoint.open(path) as saved:
        saved.verify()
        described = [
            (t.embedding_dim, t.dtype, t.seed, t.optimizer, t.hyper, t.policy, t.step, t.now)
            for t in saved.tables.values()
        ]
        return [saved.dense(), saved.state, described]


@pytest.mark.parametrize(("parts", "columns"), [(1, None), (3, None), (3, 2), (5, 9), (2, 1)])
def test_the_content_is_the_same(
    path: Path, tmp_path: Path, parts: int, columns: int | None
) -> None:
    checkpoint.reshard(path, tmp_path / "out", parts=parts, columns=columns)
    assert same(saved_content(tmp_path / "out"), saved_content(path))
    assert same(dense_files(tmp_path / "out"), dense_files(path))
    with checkpoint.open(tmp_path / "out") as saved, checkpoint.open(path) as before:
        assert saved.ranks == parts
        assert saved.uuid != before.uuid
        shards = {len(t.parts) // parts for t in saved.manifest.tables.values()}
    assert shards == {min(columns or 1, dim // 4) for dim in (8, 12)}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_each_part_has_the_ids_of_its_rank(path: Path, tmp_path: Path) -> None:
    checkpoint.reshard(path, tmp_path / "out", parts=4)
    with checkpoint.open(tmp_path / "out") as saved:
        for name, table in saved.tables.items():
            parts = saved.manifest.tables[name].parts
            assert [part.id_slots for part in parts] == [
                checkpoint.IdSlots(rank, rank + 1, 4) for rank in range(4)
            ]
            begin, ids = 0, torch.cat([torch.empty(0, dtype=torch.int64), *table.id_batches(64)])
            for rank, part in enumerate(parts):
                own = ids[begin : begin + part.ids]
                assert bool((ops.id_owners(own, parts=4, slots=4) == rank).all())
                assert part.ids > 50 or name == "tables.empty"
                begin += part.ids
            assert begin == table.ids


def test_there_and_back(path: Path, tmp_path: Path) -> None:
    """Also a sketch: parts share it, so that nothing is counted twice."""
    checkpoint.reshard(path, tmp_path / "a", parts=3, columns=3)
    checkpoint.reshard(tmp_path / "a", tmp_path / "b", parts=2, columns=2, slots=64)
    checkpoint.reshard(tmp_path / "b", tmp_path / "c", parts=1, columns=1)
    assert same(saved_content(tmp_path / "c"), saved_content(path))
    with checkpoint.open(tmp_path / "b") as saved:
        slots = {
            (p.slots_begin, p.slots_end, p.slots) for p in saved.manifest.tables["tables.ads"].parts
        }
    assert slots == {(0, 32, 64), (32, 64, 64)}
    with checkpoint.open(tmp_path / "c") as saved:  # ranks that shared out 64 slots go on with it
        assert saved.manifest.tables["tables.ads"].parts[0].slots == 64


def test_a_model_loads_it(path: Path, model: nn.ModuleDict, tmp_path: Path) -> None:
    checkpoint.reshard(path, tmp_path / "out", parts=3, columns=2)
    twin = trained_model(steps=1, ids=10)
    report = checkpoint.load(tmp_path / "out", twin)
    assert not any(table.exact for table in report.tables.values())
    assert all(table.fresh == () for table in report.tables.values())
    groups = [of["tables"].group for of in (model, twin)]
    for number in range(3):
        contents = [group_content(group, number) for group in groups]
        assert same(*contents)
    checkpoint.save(tmp_path / "again", twin)
    found, before = saved_content(tmp_path / "again"), saved_content(path)
    assert same(found["tables.items"].counts, before["tables.items"].counts)
    assert same(found["tables.ads"].sketch, before["tables.ads"].sketch)
    assert same(*[of["top"].state_dict() for of in (model, twin)])


def test_a_rank_reads_its_own_files_only(path: Path, model: nn.ModuleDict, tmp_path: Path) -> None:
    checkpoint.reshard(path, tmp_path / "out", parts=3)
    with checkpoint.open(tmp_path / "out") as saved:
        parts = {
            name.removeprefix("tables."): table.parts
            for name, table in saved.manifest.tables.items()
        }
    for rank in range(3):
        shutil.copytree(tmp_path / "out", tmp_path / f"for{rank}")
        others = [part for of in parts.values() for part in of if part.rank != rank]
        files = [file for part in others for file in (*part.rows, part.counts) if file is not None]
        assert len(files) == 2 * (4 + 1)  # rows of four tables, and counts
        for file in files:
            (tmp_path / f"for{rank}" / file.path).unlink()
        twin = trained_model(steps=1, ids=10)
        twin["tables"] = RowPart(twin["tables"], rank, 3)  # type: ignore[arg-type]
        checkpoint.load(tmp_path / f"for{rank}", twin)
        for number, name in enumerate(("users", "items", "ads")):
            whole = group_content(model["tables"].group, number)
            own = ops.id_owners(whole.ids, parts=3, slots=3) == rank
            found = group_content(twin["tables"].tables.group, number)
            assert torch.equal(found.ids, whole.ids[own])
            assert torch.equal(found.rows, whole.rows[own])
            assert found.ids.numel() == parts[name][rank].ids > 50


def test_counters_and_steps_go_on(path: Path, model: nn.ModuleDict, tmp_path: Path) -> None:
    checkpoint.reshard(path, tmp_path / "out", parts=3)
    twin, model = trained_model(steps=1, ids=10), copy.deepcopy(model)
    checkpoint.load(tmp_path / "out", twin)
    one, other = (of["tables"].group.usage.tables()["users"] for of in (model, twin))
    assert one.inserted == other.inserted > 0
    batch = {n: torch.arange(4)[None] for n in ("users", "items", "ads", "empty")}
    for of in (model, twin):  # bias corrections count the same steps
        of["tables"](batch).sum().backward()
    assert same(*(group_content(of["tables"].group, 0)[:3] for of in (model, twin)))


def test_column_shards_stay_unless_asked(tmp_path: Path) -> None:
    shards = ColumnShards([8, 4], td.Adam(lr=0.1))
    shards.train_on(torch.arange(100))
    checkpoint.save(tmp_path / "saved", shards)
    checkpoint.reshard(tmp_path / "saved", tmp_path / "out", parts=2)
    with checkpoint.open(tmp_path / "out") as saved:
        parts = saved.manifest.tables["shards"].parts
    assert [(p.first_column, p.columns, p.slots_begin) for p in parts] == [
        (0, 8, 0),
        (0, 8, 1),
        (8, 4, 0),
        (8, 4, 1),
    ]
    assert parts[0].ids_crc32c == parts[2].ids_crc32c != parts[1].ids_crc32c
    twin = ColumnShards([8, 4], td.Adam(lr=0.1))
    checkpoint.load(tmp_path / "out", twin)
    for one, other in zip(shards.shards, twin.shards, strict=True):
        assert same(*(group_content(of.group, 0) for of in (one, other)))  # type: ignore[arg-type]


def test_8_bit_state_keeps_its_columns(tmp_path: Path) -> None:
    optimizer = td.Adam(lr=0.1, state_dtype=torch.uint8)
    shards = ColumnShards([8, 4], optimizer)
    shards.train_on(torch.arange(100))
    checkpoint.save(tmp_path / "saved", shards)
    for columns in (1, 3):
        with pytest.raises(ValueError, match=r"but table 'shards' .* leave columns out"):
            checkpoint.reshard(tmp_path / "saved", tmp_path / "out", parts=2, columns=columns)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    checkpoint.reshard(tmp_path / "saved", tmp_path / "out", parts=2)
    assert same(saved_content(tmp_path / "out"), saved_content(tmp_path / "saved"))
    twin = ColumnShards([8, 4], optimizer)
    checkpoint.load(tmp_path / "out", twin)
    for one, other in zip(shards.shards, twin.shards, strict=True):
        assert same(*(group_content(of.group, 0) for of in (one, other)))  # type: ignore[arg-type]


def test_sketches_are_added_only_where_parts_have_ids_of_several(
    path: Path, tmp_path: Path
) -> None:
    checkpoint.reshard(path, tmp_path / "three", parts=3, slots=6)
    name = "tables.ads"
    with checkpoint.open(tmp_path / "three") as saved:
        manifest = saved.manifest
    table = manifest.tables[name]
    width = table.parts[0].sketch_width
    sketches = [torch.full((4, width), 10**k, dtype=torch.int32) for k in range(3)]
    with table_files.Folder(Disk(), tmp_path / "three" / manifest.uuid) as folder:
        parts = [
            replace(part, sketch=folder.write(f"sketch{k}", {"sketch": sketches[k]}, 4))
            for k, part in enumerate(table.parts)
        ]
    tables = {**manifest.tables, name: replace(table, parts=parts)}
    (tmp_path / "three" / "manifest.json").write_bytes(replace(manifest, tables=tables).text())

    def sketches_of(parts: int) -> list[int]:
        out = tmp_path / f"of{parts}"
        checkpoint.reshard(tmp_path / "three", out, parts=parts, slots=6)
        with checkpoint.open(out) as saved:
            table = saved.tables[name]
            found = [table.sketches([part]) for part in saved.manifest.tables[name].parts]
            total = table.sketch()
        assert total is not None
        assert total.unique().tolist() == [111]
        return [int(of[0][0, 0]) for of in found]

    assert sketches_of(3) == [1, 10, 100]
    assert sketches_of(6) == [1, 1, 10, 10, 100, 100]
    assert sketches_of(2) == [111, 111]  # the middle one has gone to both
    assert sketches_of(1) == [111]


@pytest.mark.long_cases("1")
@pytest.mark.parametrize("at_once", [1, 5])
def test_many_parts_take_several_passes_and_long_ones_several_files(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(RESHARD, "_FILES_AT_ONCE", at_once)
    monkeypatch.setattr(RESHARD, "PIECE_BYTES", 1000)
    monkeypatch.setattr(table_files, "FILE_BYTES", 2000)
    checkpoint.reshard(path, tmp_path / "out", parts=7, columns=2)
    with checkpoint.open(tmp_path / "out") as saved:
        assert len(saved.manifest.tables["tables.users"].parts[0].rows) > 2
    assert same(saved_content(tmp_path / "out"), saved_content(path))
    assert same(dense_files(tmp_path / "out"), dense_files(path))


# -- refused, and failing ------------------------------------------------------------------------


def test_wrong_arguments(path: Path, tmp_path: Path) -> None:
    for arguments, said in (
        ({"parts": 0}, "parts is 0, expected at least 1"),
        ({"parts": 2, "columns": 0}, "columns is 0, expected at least 1"),
        ({"parts": 8, "slots": 7}, "slots is 7, expected at least 8"),
    ):
        with pytest.raises(ValueError, match=said):
            checkpoint.reshard(path, tmp_path / "out", **arguments)
    (tmp_path / "file").write_text("text")
    for there in (path, tmp_path / "file"):
        with pytest.raises(FileExistsError, match="exists already"):
            checkpoint.reshard(path, there, parts=2)
    with pytest.raises(FileNotFoundError, match="is not a checkpoint"):
        checkpoint.reshard(tmp_path / "absent", tmp_path / "out", parts=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


class FailingDisk(Disk):
    """Fails at a call of a method."""

    def __init__(self, method: str, call: int, error: BaseException) -> None:
        def fail(*arguments: object) -> object:
            self.calls += 1
            if self.calls == call:
                raise copy.copy(error)  # one that was raised keeps the frames of the test
            return getattr(Disk, method)(self, *arguments)

        self.calls = 0
        setattr(self, method, fail)


@pytest.mark.parametrize(
    ("method", "call", "error"),
    [
        ("write_at", 9, OSError(28, "No space left on device")),
        ("write_at", 30, KeyboardInterrupt()),
        ("sync", 2, OSError(5, "Input/output error")),
        ("write_at", 1, OSError(28, "No space left on device")),
        ("rename", 1, KeyboardInterrupt()),
    ],
)
def test_a_failure_leaves_nothing(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    call: int,
    error: BaseException,
) -> None:
    disk = FailingDisk(method, call, error)
    monkeypatch.setattr(RESHARD, "_DISK", disk)
    with pytest.raises(type(error), match="free: make room" if "space" in str(error) else None):
        checkpoint.reshard(path, tmp_path / "out", parts=3)
    assert disk.calls >= call
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_leaves_nothing(path: Path, tmp_path: Path) -> None:
    model = trained_model()
    checkpoint.save(tmp_path / "saved", model)
    with checkpoint.open(tmp_path / "saved") as saved:
        files = [file for file in saved.manifest.files() if file.path.split("/")[1] != "groups"]
    for file in files:
        if file.path.split("/")[1] == "tables.empty":
            continue
        damaged = bytearray((tmp_path / "saved" / file.path).read_bytes())
        damaged[-1] ^= 1
        (tmp_path / "saved" / file.path).write_bytes(damaged)
        with pytest.raises(checkpoint.DamagedFileError, match=Path(file.path).name):
            checkpoint.reshard(tmp_path / "saved", tmp_path / "out", parts=2)
        damaged[-1] ^= 1
        (tmp_path / "saved" / file.path).write_bytes(damaged)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


# -- files with tensors that grow side by side ---------------------------------------------------


@given(st.binary(max_size=50), st.binary(max_size=50))
@settings(deadline=None, database=None)
def test_sums_are_joined(first: bytes, second: bytes) -> None:
    def crc32c(data: bytes) -> int:
        return ops.crc32c(torch.tensor(list(data), dtype=torch.uint8))

    joined = scattered_file.joined_crc32c(crc32c(first), crc32c(second), len(second))
    assert joined == crc32c(first + second)


@pytest.mark.parametrize("block_bytes", [64, 1000, 1 << 20])
def test_a_scattered_file_is_what_one_in_order_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(scattered_file, "BLOCK_BYTES", block_bytes)
    values = {
        "a": torch.randn(100, 3),
        "b": torch.arange(100),
        "none": torch.empty(0, 5),
        "c": torch.arange(100, dtype=torch.uint8),
    }
    shapes = [TensorShape(name, of.dtype, tuple(of.shape)) for name, of in values.items()]
    file = scattered_file.ScatteredFile(Disk(), tmp_path / "file", shapes)
    for begin in range(0, 100, 7):
        for name in ("b", "none", "c", "a"):
            file.append(name, values[name][begin : begin + 7].contiguous())
    sums = file.finish()
    assert sums.bytes == os.path.getsize(tmp_path / "file")
    reader = ChecksummedReader(tmp_path / "file", sums)
    for name, expected in values.items():
        out = torch.empty_like(expected)
        reader.read(name, 0, out)
        assert torch.equal(out, expected)
    reader.finish()
    reader.close()


def test_a_scattered_file_knows_its_rows(tmp_path: Path) -> None:
    shapes = [TensorShape("a", torch.int64, (3,))]
    file = scattered_file.ScatteredFile(Disk(), tmp_path / "file", shapes)
    file.append("a", torch.arange(2))
    with pytest.raises(RuntimeError, match="lacks rows of"):
        file.finish()
    with pytest.raises(RuntimeError, match="more rows"):
        file.append("a", torch.arange(2))
    file.close()
