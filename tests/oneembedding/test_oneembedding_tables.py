"""Readers and writers of snapshots, and snapshots of OneFlow."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oneflow_files import write_table, xxh64
from small_embeddings import content, embedding, store

import torch_dynemb as td
from torch_dynemb import oneembedding

pytestmark = pytest.mark.cpu_only("files")

reader = oneembedding.make_persistent_table_reader
writer = oneembedding.make_persistent_table_writer
KEY_TYPES = {"q": torch.int64, "i": torch.int32, "Q": torch.uint64, "I": torch.uint32}
OPTIMIZERS = [td.SGD(lr=0.1), td.Adam(lr=0.1), td.SmartDecayAdam(lr=0.1)]


def trained(path: Path, optimizer: Any, **options: Any) -> Any:
    module = embedding(path=path, size_factor=4, optimizer=optimizer, **options)
    for step in range(3):
        module(torch.arange(30).view(10, 3) % (7 + step)).sin().sum().backward()
        module.optimizer.step()
    return module


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_what_is_read_and_written_again_is_the_same(tmp_path: Path, optimizer: Any) -> None:
    module = trained(tmp_path, optimizer)
    module.save_snapshot("first")
    width = 4 + sum(tensor.columns(4) for tensor in optimizer.state)
    types = (torch.int64, torch.float32)
    found = {}
    with (
        reader([str(tmp_path)], "first", *types, width) as source,
        writer(
            [str(tmp_path)], "second", *types, width, embedding=module, optimizer_steps=3
        ) as target,
    ):
        for keys, values in source:
            assert values.shape == (len(keys), width)
            found |= {(source.table_id, int(k)): v for k, v in zip(keys, values, strict=True)}
            target.write(keys, values, source.table_id)
    rows = content(module)
    assert found.keys() == rows.keys()
    assert all(torch.equal(found[key][:4], row) for key, row in rows.items())
    other = embedding(path=tmp_path, size_factor=4, optimizer=optimizer)
    other.load_snapshot("second")
    for of in (module, other):
        of(torch.arange(60).view(20, 3)).sin().sum().backward()
        of.optimizer.step()
    if optimizer.name != "SmartDecayAdam":  # its rows also know the clock of the table
        for key, row in content(module).items():
            torch.testing.assert_close(content(other)[key], row)


def test_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_dynemb.oneembedding import table_reader

    module = embedding(1, path=tmp_path)
    module(torch.arange(1000))
    module.save_snapshot("many")
    monkeypatch.setattr(table_reader, "_ROWS", 300)
    with reader([tmp_path], "many", torch.int64, torch.float32, 4) as source:
        assert [len(keys) for keys, _ in source] == [300, 300, 300, 100]
    monkeypatch.setattr(table_reader, "_BYTES", 1600)
    with reader([tmp_path], "many", torch.int64, torch.float32, 4) as source:
        assert len(next(source).keys) == 100
    with pytest.raises(ValueError, match="reader is closed"):
        next(source)


def test_some_tables_are_read(tmp_path: Path) -> None:
    trained(tmp_path, td.Adam(lr=0.1)).save_snapshot("all")
    arguments = ([tmp_path / "0-2", tmp_path / "1-2"], "all", torch.int32, torch.bfloat16, 4)
    with reader(*arguments, tables=[2]) as source:
        for keys, values in source:
            assert (source.table_id, keys.dtype, values.dtype) == (2, torch.int32, torch.bfloat16)


@pytest.mark.parametrize("key_format", KEY_TYPES)
def test_keys_are_written_as_they_are_read(tmp_path: Path, key_format: str) -> None:
    key_type = KEY_TYPES[key_format]
    bounds = torch.iinfo(key_type)
    keys = torch.tensor([bounds.min, bounds.max, 5, 7], dtype=key_type)
    values = torch.arange(16.0).view(4, 4)
    types = (key_type, torch.float32, 4)
    with writer([tmp_path], "given", *types) as target:
        target.write(keys[:3], torch.zeros(3, 4))
        target.write(keys, values.numpy())  # the last values count
    with reader([tmp_path], "given", *types) as source:
        ((given, rows),) = source
    assert dict(zip(given.tolist(), rows.tolist(), strict=True)) == dict(
        zip(keys.tolist(), values.tolist(), strict=True)
    )
    module = embedding(tables=None, key_type=key_type, path=tmp_path)
    module.set_optimizer(td.Adam(lr=0.1))
    module.load_snapshot("given")
    assert torch.equal(module(keys), values)


def test_arrays_of_numpy_and_numbers_of_tables(tmp_path: Path) -> None:
    module = embedding(path=tmp_path, padding_idx=9, seed=4)
    with writer([tmp_path], "given", torch.int64, torch.float16, 4, embedding=module) as target:
        values = np.ones((3, 4), dtype=np.float16)
        target.write(np.array([1, 2, 3]), values, np.array([0, 2, 2]))
        for table_ids in (3, np.array([0, 3, 1]), [0, 1, 2], np.zeros(2, dtype=np.int64)):
            with pytest.raises((TypeError, ValueError), match="write: table_ids"):
                target.write(np.array([1, 2, 3]), values, table_ids)
        for keys, of_keys, error in (
            (np.array([1.0]), values[:1], "write: keys is .*expected a dense tensor"),
            (np.array([1]), values, r"write: keys has shape \(1,\) and values \(3, 4\)"),
            (np.array([1]), values[:1].astype(np.float32), "write: values is"),
            (np.array([9]), values[:1], "write: keys has 9, the padding_idx"),
        ):
            with pytest.raises((TypeError, ValueError), match=error):
                target.write(keys, of_keys)
    module.load_snapshot("given")
    assert content(module).keys() == {(0, 1), (2, 2), (2, 3)}
    fresh = embedding(padding_idx=9, seed=4)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(module(ids), fresh(ids))  # new ids start as they would have
    with pytest.raises(ValueError, match="the writer is closed"):
        target.write(np.array([1]), values[:1])


def test_what_was_not_closed_is_not_there(tmp_path: Path) -> None:
    types = (torch.int64, torch.float32, 4)
    with writer([tmp_path], "given", *types) as target:
        target.write(torch.tensor([1]), torch.ones(1, 4))
    failing = writer([tmp_path], "given", *types)
    failing.write(torch.tensor([2]), torch.ones(1, 4))
    failing.__exit__(ZeroDivisionError, ZeroDivisionError(), None)  # as a with would
    assert [path.name for path in (tmp_path / "snapshots").iterdir()] == ["given"]
    with reader([tmp_path], "given", *types) as source:
        assert [keys.tolist() for keys, _ in source] == [[1]]
    (tmp_path / "snapshots" / "other").mkdir()
    with pytest.raises(FileExistsError, match="exists but is not a checkpoint"):
        writer([tmp_path], "other", *types)


# -- OneFlow's files -----------------------------------------------------------------------------


def rows_of(keys: range, width: int, start: float = 0.0) -> dict[int, list[float]]:
    return {key: [start + key + k / 16 for k in range(width)] for key in keys}


def test_the_hash_is_that_of_its_specification() -> None:
    assert xxh64(b"\0" * 8, 0) == 0x34C96ACDCADB1BBB


@pytest.mark.parametrize(
    ("key_format", "width", "block"),
    [("q", 3, 512), ("i", 128, 512), ("Q", 300, 512), ("I", 3, 4096), ("q", 300, 4096)],
)
def test_rows_of_oneflow_s_files(tmp_path: Path, key_format: str, width: int, block: int) -> None:
    writes = [
        rows_of(range(40), width),
        rows_of(range(30, 45), width, 100),
        rows_of(range(1), width),
    ]
    layout = {"key_format": key_format, "block": block, "blocks_per_chunk": 1}
    paths = write_table(tmp_path, writes, ranks=2, **layout)
    assert len(list((tmp_path / "1-2" / "values").iterdir())) > 1
    types = (KEY_TYPES[key_format], torch.float32, width)
    with reader(paths, "last", *types, physical_block_size=block) as source:
        found = {
            int(key): row.tolist()
            for keys, values in source
            for key, row in zip(keys.tolist(), values, strict=True)
        }
    assert found == {**writes[0], **writes[1], **writes[2]}


OF_ONEFLOW = {"MomentumSGD": (td.MomentumSGD(lr=0.5), 2), "Adam": (td.Adam(lr=0.5), 3)}


@pytest.mark.parametrize("name", OF_ONEFLOW)
def test_a_snapshot_of_oneflow_is_loaded(tmp_path: Path, name: str) -> None:
    optimizer, factor = OF_ONEFLOW[name]
    rows = rows_of(range(100), 4 * factor)
    paths = write_table(tmp_path / "theirs", [rows], ranks=2)
    module = embedding(2, path=tmp_path / "ours", padding_idx=3, optimizer=optimizer)
    report = oneembedding.import_snapshot(
        module, paths, "last", table_of=lambda keys: (keys >= 50).to(torch.int64), optimizer_steps=7
    )
    assert {name: table.ids for name, table in report.tables.items()} == {
        "table_0": 49,
        "table_1": 50,
    }
    found = content(module)
    assert found.keys() == {(int(key >= 50), key) for key in rows if key != 3}
    assert all(found[key].tolist() == rows[key[1]][:4] for key in found)
    module.save_snapshot("ours")
    types = (torch.int64, torch.float32, 4 * factor)
    of_state = -2.0 if name == "MomentumSGD" else 1.0  # they keep -lr times what we keep
    with reader([tmp_path / "ours"], "ours", *types) as source:
        for keys, values in source:
            for key, row in zip(keys.tolist(), values.tolist(), strict=True):
                expected = [of_state * x for x in rows[key][4:]]
                assert row[4:] == pytest.approx(expected)
    with pytest.raises(FileExistsError, match="load it with load_snapshot"):
        oneembedding.import_snapshot(module, paths, "last")


def imported(tmp_path: Path, **options: Any) -> Any:
    paths = write_table(tmp_path / "theirs", [rows_of(range(20), 12)], ranks=2)
    tables = options.pop("count", 1)
    optimizer = options.pop("optimizer", td.Adam(lr=0.1))
    path = options.pop("path", tmp_path / "ours")
    module = embedding(tables, path=path, optimizer=optimizer)
    given = options.pop("paths", lambda of: of)(paths)
    return oneembedding.import_snapshot(module, given, options.pop("name", "last"), **options)


def test_rows_alone_are_loaded_for_any_optimizer(tmp_path: Path) -> None:
    report = imported(tmp_path, optimizer=None, optimizer_state=False)
    assert report.tables["table_0"].ids == 20


@pytest.mark.parametrize(
    ("options", "kind", "error"),
    [
        ({"count": 2}, ValueError, "table_of is None, but embedding 'small' has 2 tables"),
        (
            {"optimizer": td.Adagrad(lr=0.1)},
            ValueError,
            r"have 12 elements, expected 8 of the 4 columns of embedding 'small' with Adagrad",
        ),
        ({"optimizer": None}, ValueError, "with no optimizer yet, and one of .* give it the opt"),
        ({"paths": lambda of: of[:1]}, ValueError, r"has folders of ranks \[0\] of 2: give those"),
        ({"paths": lambda of: [of[0][:-4]]}, FileNotFoundError, "was not written by OneFlow"),
        ({"paths": lambda of: of[0]}, TypeError, "paths is a str, expected a list of paths"),
        ({"physical_block_size": 512}, ValueError, "was written with 4096: give that"),
        ({"name": "first"}, FileNotFoundError, "is not a snapshot: it lacks the file LIST"),
        ({"optimizer_steps": -1}, ValueError, "optimizer_steps is -1"),
        ({"table_of": lambda keys: keys * 0 + 1}, ValueError, "table_ids has 1, expected 0 to 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, options: dict[str, Any], kind: type[Exception], error: str
) -> None:
    with pytest.raises(kind, match=error):
        imported(tmp_path, **options)
    assert not list((tmp_path / "ours" / "snapshots").glob("*"))


def cut(name: str, size: int) -> Callable[[Path], object]:
    def change(root: Path) -> None:
        with (root / "0-1" / name).open("r+b") as file:
            file.truncate(size)

    return change


def text(name: str, of: str) -> Callable[[Path], object]:
    return lambda root: (root / "0-1" / name).write_text(of)


@pytest.mark.parametrize(
    ("change", "kind", "error"),
    [
        (cut("values/value-000000000000", 4096), ValueError, "have 85 rows: files are truncated"),
        (cut("keys/key-000000000000", 80), ValueError, "have 10 rows: files are truncated"),
        (lambda r: (r / "0-1/keys/key-000000000000").unlink(), FileNotFoundError, "is missing"),
        (text("VALUE_SIZE", "fifty"), ValueError, "VALUE_SIZE has 'fifty', expected a number"),
        (text("VALUE_SIZE", "50"), ValueError, "have 50 bytes, expected a multiple of 4"),
        (text("KEY_SIZE", "4"), ValueError, "key_type is torch.int64, but keys of .* have 4 bytes"),
        (text("VALUE_SIZE", "16"), ValueError, "storage_dim is 12, but values of .* have 4 elem"),
        (text("snapshots/last/LIST", "index-1"), ValueError, "LIST has 'index-1', expected index-"),
        (lambda r: shutil.rmtree(r / "0-1/snapshots"), FileNotFoundError, "is not a snapshot"),
    ],
)
def test_damaged_files_of_oneflow_are_named(
    tmp_path: Path, change: Callable[[Path], object], kind: type[Exception], error: str
) -> None:
    paths = write_table(tmp_path, [rows_of(range(200), 12)])
    change(tmp_path)
    with pytest.raises(kind, match=error):
        list(reader(paths, "last", torch.int64, torch.float32, 12))


@pytest.mark.parametrize(
    ("arguments", "kind", "error"),
    [
        ({"paths": []}, ValueError, "paths is empty"),
        ({"paths": "here"}, TypeError, "paths is 'here', expected a list"),
        ({"key_type": torch.int8}, TypeError, "key_type is torch.int8"),
        ({"value_type": torch.float64}, TypeError, "value_type is torch.float64, expected one of"),
        ({"storage_dim": 5}, ValueError, "storage_dim is 5, expected 4 for rows alone, or 12 with"),
        ({"physical_block_size": 1}, ValueError, "physical_block_size is 1"),
        ({"snapshot_name": "a/b"}, ValueError, "snapshot_name is 'a/b'"),
        ({"snapshot_name": "none"}, FileNotFoundError, "none"),
        ({"tables": [1]}, ValueError, r"tables has 1, but .* has \[0\]"),
    ],
)
def test_wrong_arguments_of_readers(
    tmp_path: Path, arguments: dict[str, Any], kind: type[Exception], error: str
) -> None:
    module = embedding(1, path=tmp_path, optimizer=td.Adam(lr=0.1))
    module(torch.arange(3)).sum().backward()
    module.optimizer.step()
    module.save_snapshot("last")
    given = {
        "paths": [tmp_path],
        "snapshot_name": "last",
        "key_type": torch.int64,
        "value_type": torch.float32,
        "storage_dim": 4,
    }
    with pytest.raises(kind, match=error):
        list(reader(**{**given, **arguments}))


def test_eight_bit_state_is_read_as_rows_alone(tmp_path: Path) -> None:
    module = trained(tmp_path, td.Adam(lr=0.1, state_dtype=torch.uint8))
    module.save_snapshot("last")
    with pytest.raises(ValueError, match="exp_avg has 8 bits with scales: give 4"):
        reader([tmp_path], "last", torch.int64, torch.float32, 12)
    with reader([tmp_path], "last", torch.int64, torch.float32, 4) as source:
        assert sum(len(keys) for keys, _ in source) == len(content(module))


def test_a_writer_for_an_embedding_wants_its_row(tmp_path: Path) -> None:
    module = embedding(store_options=store(tmp_path, size_factor=3), optimizer=td.Adam(lr=0.1))
    for storage_dim, key_type, error in (
        (8, torch.int64, "storage_dim is 8, expected 4 for rows alone, or 12 with exp_avg 4"),
        (12, torch.int32, r"key_type is torch\.int32, but that of the embedding is torch\.int64"),
    ):
        with pytest.raises(ValueError, match=error):
            writer([tmp_path], "a", key_type, torch.float32, storage_dim, embedding=module)
    with pytest.raises(TypeError, match="embedding is 3"):
        writer([tmp_path], "a", torch.int64, torch.float32, 4, embedding=3)
    assert list(tmp_path.iterdir()) == []
