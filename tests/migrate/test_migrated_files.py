"""Raw files, npz and Parquet, written by other programs: read, or refused by name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from foreign_files import Rows, some_rows
from table_rows import assert_holds

import torch_dynemb as td
from torch_dynemb import migrate

pytestmark = pytest.mark.cpu_only("files, which are read on the CPU")

DIM = 6


def table(**arguments: Any) -> td.DynamicEmbedding:
    given: dict[str, Any] = {
        "optimizer": td.Adagrad(lr=0.1),
        "policy": td.Policy(score="frequency"),
    }
    return td.DynamicEmbedding(DIM, **{**given, **arguments})


def write_raw(folder: Path, rows: Rows, name: str = "") -> dict[str, Any]:
    rows.ids.tofile(folder / f"keys{name}")
    rows.values.tofile(folder / f"values{name}")
    rows.state["sum"].tofile(folder / f"sum{name}")
    rows.scores["frequency"].tofile(folder / f"seen{name}")
    return {
        "state": {"sum": folder / f"sum{name}"},
        "scores": {"frequency": folder / f"seen{name}"},
    }


def test_raw_files(tmp_path: Path) -> None:
    rows, items = some_rows(1000, DIM), table()
    beside = write_raw(tmp_path, rows)
    source = migrate.read_raw(tmp_path / "keys", tmp_path / "values", embedding_dim=DIM, **beside)
    migrate.load(items, source, batch_size=64)
    assert_holds(items, rows, scores=("frequency",))


def test_raw_files_in_several_parts_and_state_by_row(tmp_path: Path) -> None:
    rows, items = some_rows(1000, DIM, per_row=True), table(optimizer=td.RowWiseAdagrad(lr=0.1))
    for number, chosen in enumerate(np.array_split(np.arange(1000), 3)):
        write_raw(tmp_path, rows.part(chosen), f".{number}")

    def parts(name: str) -> list[str]:
        return [str(tmp_path / f"{name}.{number}") for number in range(3)]

    source = migrate.read_raw(
        parts("keys"), parts("values"), embedding_dim=DIM, state={"sum": parts("sum")}
    )
    migrate.load(items, source)
    assert_holds(items, rows)


@pytest.mark.parametrize("kind", ["uint64", "int32", "uint32"])
@pytest.mark.parametrize("floats", ["float16", "float64"])
def test_raw_files_of_other_dtypes(tmp_path: Path, kind: str, floats: str) -> None:
    keys = np.array([1, 5, 2**31 - 1 if kind == "int32" else np.iinfo(kind).max], kind)
    values = np.arange(18).reshape(3, DIM).astype(floats) / 4
    keys.tofile(tmp_path / "keys")
    values.tofile(tmp_path / "values")
    items = table()
    source = migrate.read_raw(
        tmp_path / "keys",
        tmp_path / "values",
        embedding_dim=DIM,
        key_dtype=getattr(torch, kind),
        value_dtype=getattr(torch, floats),
    )
    migrate.load(items, source)
    ids = keys.view(np.int64) if kind == "uint64" else keys.astype(np.int64)
    assert_holds(items, Rows(ids, values.astype(np.float32)), state=False)


def test_raw_files_that_do_not_match(tmp_path: Path) -> None:
    rows = some_rows(100, DIM)
    beside = write_raw(tmp_path, rows)
    keys, values = tmp_path / "keys", tmp_path / "values"

    def read(**arguments: Any) -> Any:
        return migrate.read_raw(keys, values, **{"embedding_dim": DIM, **beside, **arguments})

    with pytest.raises(ValueError, match=r"values has 120 rows, but .*keys has 100 keys"):
        read(embedding_dim=5)
    with pytest.raises(
        ValueError, match="values has 2400 bytes, which is not a whole number of ro"
    ):
        read(embedding_dim=7)
    with pytest.raises(ValueError, match=r"values has 100 rows, but .*keys has 200 keys of"):
        read(key_dtype=torch.int32)
    with pytest.raises(ValueError, match=r"key_dtype is torch.float32, expected one of"):
        read(key_dtype=torch.float32)
    with pytest.raises(FileNotFoundError, match=r"read_raw: keys: file .*nowhere does not exist"):
        migrate.read_raw(tmp_path / "nowhere", values, embedding_dim=DIM)
    with pytest.raises(ValueError, match="values has 2 files, but keys has 1"):
        migrate.read_raw(keys, [values, values], embedding_dim=DIM)
    with pytest.raises(TypeError, match="keys is 3, expected a path or a list of paths"):
        migrate.read_raw(3, values, embedding_dim=DIM)  # type: ignore[arg-type]
    source = read()
    with (tmp_path / "seen").open("r+b") as file:
        file.truncate(8 * 99)
    items = table()
    with pytest.raises(ValueError, match=r"seen has 99 rows, but .*keys has 100"):
        migrate.load(items, source)
    with values.open("r+b") as file:
        file.truncate(2399)
    with pytest.raises(ValueError, match="values has 2399 bytes, which is not a whole number"):
        migrate.load(items, source)
    assert len(items) == 0


# -- npz and Parquet -----------------------------------------------------------------------------


def columns_of(rows: Rows) -> dict[str, Any]:
    return {
        "id": rows.ids,
        "row": rows.values,
        "state.sum": rows.state["sum"],
        "score.frequency": rows.scores["frequency"],
    }


def write_parquet(path: Path, columns: dict[str, Any], *, fixed: bool = False) -> None:
    arrays = {}
    for name, values in columns.items():
        array = pyarrow.array(values.reshape(-1))
        if values.ndim == 2 and fixed:
            array = pyarrow.FixedSizeListArray.from_arrays(array, values.shape[1])
        elif values.ndim == 2:
            array = pyarrow.array(list(values))
        arrays[name] = array
    pyarrow.parquet.write_table(pyarrow.table(arrays), path, row_group_size=150)


@pytest.mark.parametrize("compressed", [False, True])
def test_npz(tmp_path: Path, compressed: bool) -> None:
    rows, items = some_rows(1000, DIM), table()
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "table.npz", note=np.array("own note"), **columns_of(rows))
    migrate.load(items, migrate.read_npz(tmp_path / "table.npz"), batch_size=64)
    assert_holds(items, rows, scores=("frequency",))


@pytest.mark.parametrize("fixed", [False, True])
def test_parquet(tmp_path: Path, fixed: bool) -> None:
    rows, items = some_rows(1000, DIM), table()
    write_parquet(tmp_path / "table.parquet", columns_of(rows), fixed=fixed)
    migrate.load(items, migrate.read_parquet(tmp_path / "table.parquet"), batch_size=64)
    assert_holds(items, rows, scores=("frequency",))


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_columns_of_other_names_and_dtypes(tmp_path: Path, kind: str) -> None:
    values = np.arange(12).reshape(2, DIM).astype(np.float16)
    columns = {
        "user": np.array([7, 9], np.uint32),
        "vector": values,
        "g2": np.array([0.5, 1.5], np.float64),
        "seen": np.array([3, 4], np.int16),
    }
    path = tmp_path / f"table.{kind}"
    if kind == "npz":
        np.savez(path, **columns)
    else:
        write_parquet(path, columns)
    read = migrate.read_npz if kind == "npz" else migrate.read_parquet
    source = read(
        [path], ids="user", rows="vector", state={"sum": "g2"}, scores={"frequency": "seen"}
    )
    items = table(optimizer=td.RowWiseAdagrad(lr=0.1))
    migrate.load(items, source)
    expected = Rows(
        columns["user"].astype(np.int64),
        values.astype(np.float32),
        {"sum": columns["g2"].astype(np.float32)[:, None]},
        {"frequency": columns["seen"].astype(np.int64)},
    )
    assert_holds(items, expected, scores=("frequency",))


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_what_an_export_writes_comes_back(tmp_path: Path, kind: str) -> None:
    rows, items, other = some_rows(500, DIM), table(), table()
    write_raw(tmp_path, rows)
    np.savez(tmp_path / "table.npz", **columns_of(rows))
    migrate.load(items, migrate.read_npz(tmp_path / "table.npz"))
    td.checkpoint.save(tmp_path / "saved", items)
    td.checkpoint.export(tmp_path / "saved", tmp_path / "out", file_format=kind, state=True)  # type: ignore[arg-type]
    read = migrate.read_npz if kind == "npz" else migrate.read_parquet
    report = migrate.load(other, read(tmp_path / "out" / "embedding"))
    assert_holds(other, rows, scores=("frequency",))
    assert report["embedding"].fresh == ("optimizer steps",)


def without_a_column(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: of for name, of in columns.items() if name != "id"}


def ids_of_floats(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "id": columns["id"].astype(np.float64)}


def flat_rows(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "row": columns["row"][:, 0]}


WRONG_COLUMNS = {
    "no ids": (without_a_column, r"has no column 'id', only \["),
    "ids of floats": (ids_of_floats, r"column 'id' of .* is torch.float64 \[n\], expected an int"),
    "rows of numbers": (flat_rows, r"column 'row' of .* is torch.float32 \[n\], expected floats"),
}


@pytest.mark.parametrize("kind", ["npz", "parquet"])
@pytest.mark.parametrize("name", WRONG_COLUMNS)
def test_wrong_columns(tmp_path: Path, kind: str, name: str) -> None:
    change, message = WRONG_COLUMNS[name]
    path, columns = tmp_path / f"table.{kind}", change(columns_of(some_rows(50, DIM)))
    if kind == "npz":
        np.savez(path, **columns)
    else:
        write_parquet(path, columns)
    read = migrate.read_npz if kind == "npz" else migrate.read_parquet
    with pytest.raises(ValueError, match=message):
        read(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_in_fortran_order(tmp_path: Path, save: Any) -> None:
    rows, items = some_rows(50, DIM), table()
    columns = {name: np.asfortranarray(values) for name, values in columns_of(rows).items()}
    assert columns["row"].flags.f_contiguous
    assert not columns["row"].flags.c_contiguous
    save(tmp_path / "fortran.npz", **columns)
    migrate.load(items, migrate.read_npz(tmp_path / "fortran.npz"), batch_size=7)
    assert_holds(items, rows, scores=("frequency",))


def test_npz_that_does_not_go_together(tmp_path: Path) -> None:
    columns = columns_of(some_rows(50, DIM))
    np.savez(tmp_path / "short.npz", **{**columns, "row": columns["row"][:40]})
    with pytest.raises(ValueError, match=r"column 'row' of .*short.npz has 40 rows, but 'id'"):
        migrate.read_npz(tmp_path / "short.npz")
    np.savez(tmp_path / "a.npz", **columns)
    narrow = {**columns, "row": columns["row"][:, :3], "state.sum": columns["state.sum"][:, :3]}
    np.savez(tmp_path / "b.npz", **narrow)
    with pytest.raises(ValueError, match=r"rows of .*b.npz have 3 values, but those of files befo"):
        migrate.read_npz([tmp_path / "a.npz", tmp_path / "b.npz"])
    for name, values, said in (
        ("id", np.array([{"a": 1}] * 50, object), r"object \(\|O\) of shape \(50,\)"),
        ("id", np.arange(50).astype(str), r"str\d+ \(<U\d+\) of shape"),
        ("id", np.arange(50).astype("datetime64[s]"), r"datetime64\[s\] \("),
        ("row", columns["row"].astype(">f4"), r"float32 \(>f4\) of shape \(50, 6\)"),
        ("row", columns["row"][None], r"float32 \(<f4\) of shape \(1, 50, 6\)"),
        ("state.sum", columns["state.sum"].astype(complex), r"complex128 \("),
    ):
        np.savez(tmp_path / "other.npz", **{**columns, name: values})
        with pytest.raises(ValueError, match=f"column '{name}' of .* (is {said}|has 1 rows)"):
            migrate.read_npz(tmp_path / "other.npz")
    with pytest.raises(FileNotFoundError, match=r"no file \*.npz is in"):
        migrate.read_npz(Path(tempfile.mkdtemp(dir=tmp_path)))


def test_parquet_that_does_not_go_together(tmp_path: Path) -> None:
    path, items = tmp_path / "table.parquet", table()
    ragged = pyarrow.table({"id": [1, 2, 3], "row": [[1.0] * DIM, [1.0] * DIM, [1.0]]})
    pyarrow.parquet.write_table(ragged, path)
    with pytest.raises(ValueError, match=r"row 2 of column 'row' of .* has 1 values, expected 6"):
        migrate.load(items, migrate.read_parquet(path))
    for ids, rows, message in (
        ([1, None], [[1.0] * DIM] * 2, "column 'id' of .* has no value in 1 of the rows from 0 on"),
        ([1, 2], [[1.0] * DIM, [None] * DIM], "column 'row' of .* has lists that lack a value"),
    ):
        pyarrow.parquet.write_table(pyarrow.table({"id": ids, "row": rows}), path)
        with pytest.raises(ValueError, match=message):
            migrate.load(items, migrate.read_parquet(path))
    assert len(items) == 0


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_damaged_files_are_refused_and_named(tmp_path: Path, kind: str) -> None:
    whole = tmp_path / f"whole.{kind}"
    columns = columns_of(some_rows(300, DIM))
    if kind == "npz":
        np.savez(whole, **columns)
    else:
        write_parquet(whole, columns)
    read = migrate.read_npz if kind == "npz" else migrate.read_parquet
    size, items = whole.stat().st_size, table()
    path = tmp_path / f"damaged.{kind}"
    for end in (0, 1, size // 2, size - 1):
        shutil.copy(whole, path)
        with path.open("r+b") as file:
            file.truncate(end)
        with pytest.raises(ValueError, match=rf"damaged\.{kind}"):
            migrate.load(items, read(path))
    assert len(items) == 0


def test_a_changed_byte_of_an_npz_is_found(tmp_path: Path) -> None:
    path, items = tmp_path / "table.npz", table()
    np.savez(path, **columns_of(some_rows(300, DIM)))
    with zipfile.ZipFile(path) as file:
        begin = file.getinfo("row.npy").header_offset
    data = bytearray(path.read_bytes())
    data[begin + 1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"table.npz is damaged.*CRC"):
        migrate.load(items, migrate.read_npz(path))
    assert len(items) == 0


@pytest.mark.parametrize(
    ("module", "function", "message"),
    [
        ("pyarrow", "read_parquet", "needs pyarrow, .*pip install 'torch_dynemb.parquet.'"),
        ("numpy", "read_npz", "needs numpy, which cannot be imported .*pip install numpy"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str, function: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=message):
        getattr(migrate, function)("table")


@pytest.mark.long
def test_files_need_not_fit_in_memory(tmp_path: Path) -> None:
    """80 MB of rows are read with far less memory than that."""
    count, dim = 160_000, 128
    ids, values = np.arange(count), np.zeros((count, dim), np.float32)
    ids.tofile(tmp_path / "keys")
    values.tofile(tmp_path / "values")
    np.savez(tmp_path / "table.npz", id=ids, row=values)
    array = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), dim)
    whole = pyarrow.table({"id": ids, "row": array})
    pyarrow.parquet.write_table(whole, tmp_path / "table.parquet", row_group_size=5000)
    program = f"""
import resource
from torch_dynemb import migrate
for source in (
    migrate.read_raw("keys", "values", embedding_dim={dim}),
    migrate.read_npz("table.npz"),
    migrate.read_parquet("table.parquet"),
):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = sum(batch.ids.numel() for batch in source.batches(5000))
    print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    for line in told.stdout.splitlines():
        rows, more = map(int, line.split())
        assert rows == count
        assert more < 50_000  # KiB
    assert len(told.stdout.splitlines()) == 3


@pytest.mark.parametrize("kind", ["raw", "npz", "parquet"])
def test_files_without_rows_make_an_empty_table(tmp_path: Path, kind: str) -> None:
    items, ids = table(), np.empty(0, np.int64)
    if kind == "raw":
        ids.tofile(tmp_path / "keys")
        ids.tofile(tmp_path / "values")
        source = migrate.read_raw(tmp_path / "keys", tmp_path / "values", embedding_dim=DIM)
    elif kind == "npz":
        np.savez(tmp_path / "t.npz", id=ids, row=np.empty((0, DIM), np.float32))
        source = migrate.read_npz(tmp_path / "t.npz")
    else:
        lists = pyarrow.array([], pyarrow.list_(pyarrow.float32()))
        pyarrow.parquet.write_table(
            pyarrow.table({"id": ids, "row": lists}), tmp_path / "t.parquet"
        )
        source = migrate.read_parquet(tmp_path / "t.parquet")
    assert migrate.load(items, source)["embedding"].ids == len(items) == 0
