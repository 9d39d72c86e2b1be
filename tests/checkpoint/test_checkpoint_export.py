"""``checkpoint.export``: ids, rows, scores and state as npz and Parquet files."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoint_content import saved_content, trained_model
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.files.disk import Disk

pytestmark = pytest.mark.cpu_only("files, which are the same on any device")
EXPORT: Any = sys.modules["torch_dynemb.checkpoint.tools.export"]


@pytest.fixture(scope="module")
def model() -> nn.ModuleDict:
    return trained_model()


@pytest.fixture(scope="module")
def path(model: nn.ModuleDict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "saved"
    checkpoint.save(path, model)
    return path


def npz_columns(folder: Path) -> dict[str, Tensor]:
    """All files of a table, by ascending ids."""
    files = [dict(numpy.load(file)) for file in sorted(folder.iterdir())]
    return by_id({k: torch.cat([torch.from_numpy(of[k]) for of in files]) for k in files[0]})


def parquet_columns(folder: Path) -> dict[str, Tensor]:
    parquet = pytest.importorskip("pyarrow.parquet")
    found: dict[str, list[Tensor]] = {}
    for file in sorted(folder.iterdir()):
        for name, column in parquet.read_table(file).to_pydict().items():
            dtype = torch.int64 if name == "id" or name.startswith("score.") else None
            found.setdefault(name, []).append(torch.tensor(column, dtype=dtype))
    return by_id({name: torch.cat(of) for name, of in found.items()})


def by_id(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    order = columns["id"].argsort()
    return {name: of[order] for name, of in columns.items()}


def expected_columns(path: Path, name: str, *, state: bool) -> dict[str, Tensor]:
    content = saved_content(path)[name]
    columns = {"id": content.ids, "row": content.rows}
    columns |= {f"score.{word}": of for word, of in content.scores.items()}
    for name, values in content.state.items() if state else ():
        columns[f"state.{name}"] = values[:, 0] if name == "step" else values
    return columns


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name].double(), values.double()), name


@pytest.mark.parametrize("state", [False, True])
def test_npz(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: bool) -> None:
    monkeypatch.setattr(EXPORT, "_NPZ_BYTES", 20_000)
    checkpoint.export(path, tmp_path / "out", file_format="npz", state=state)
    summary = json.loads((tmp_path / "out" / "tables.json").read_text())
    assert summary["checkpoint"] == checkpoint.open(path).uuid
    assert list(summary["tables"]) == [f"tables.{n}" for n in ("ads", "empty", "items", "users")]
    for name, of in summary["tables"].items():
        folder = tmp_path / "out" / of["folder"]
        names = [f"part-{k:05}.npz" for k in range(of["files"])]
        assert sorted(file.name for file in folder.iterdir()) == names
        assert max(file.stat().st_size for file in folder.iterdir()) < 26_000
        if name == "tables.empty":
            empty = numpy.load(folder / "part-00000.npz")
            assert {k: v.shape for k, v in empty.items() if k in ("id", "row")} == {
                "id": (0,),
                "row": (0, 8),
            }
            continue
        found = npz_columns(folder)
        assert found["row"].dtype == torch.float32  # also of bfloat16
        assert_same(found, expected_columns(path, name, state=state))
    assert summary["tables"]["tables.users"]["files"] > 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_parquet(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(EXPORT, "_GROUP_BYTES", 5000)
    monkeypatch.setattr(EXPORT, "_GROUPS", 3)
    checkpoint.export(path, tmp_path / "out", file_format="parquet", state=True)
    summary = json.loads((tmp_path / "out" / "tables.json").read_text())
    for name, of in summary["tables"].items():
        folder = tmp_path / "out" / of["folder"]
        if name != "tables.empty":
            found = parquet_columns(folder)
            assert_same(found, expected_columns(path, name, state=True))
    assert summary["tables"]["tables.users"]["files"] > 1


def test_parquet_columns_have_the_types_of_the_tensors(path: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    checkpoint.export(path, tmp_path / "out", file_format="parquet", state=True)
    for name, dim in (("users", 12), ("empty", 8)):
        file = tmp_path / "out" / f"tables.{name}" / "part-00000.parquet"
        types = {field.name: str(field.type) for field in parquet.read_schema(file)}
        assert types["id"] == "int64"
        assert types["row"].startswith("fixed_size_list<")
        assert types["row"].endswith(f"[{dim}]")
        assert "float" in types["state.exp_avg"]
        assert types["state.step"] == "int32"


def test_half_precision_and_8_bit_state(tmp_path: Path) -> None:
    module = td.DynamicEmbedding(
        8, optimizer=td.Adam(lr=0.1, state_dtype=torch.uint8), dtype=torch.float16
    )
    module(torch.arange(20)).sum().backward()
    checkpoint.save(tmp_path / "saved", module)
    expected = expected_columns(tmp_path / "saved", "embedding", state=True)
    checkpoint.export(tmp_path / "saved", tmp_path / "npz", file_format="npz", state=True)
    found = npz_columns(tmp_path / "npz" / "embedding")
    assert (found["row"].dtype, found["state.exp_avg"].dtype) == (torch.float16, torch.uint8)
    assert_same(found, expected)
    pytest.importorskip("pyarrow")
    checkpoint.export(tmp_path / "saved", tmp_path / "arrow", file_format="parquet", state=True)
    assert_same(parquet_columns(tmp_path / "arrow" / "embedding"), expected)


def test_some_tables(path: Path, tmp_path: Path) -> None:
    names = ["tables.users", "tables.ads", "tables.users"]
    checkpoint.export(path, tmp_path / "out", file_format="npz", tables=names)
    found = sorted(entry.name for entry in (tmp_path / "out").iterdir())
    assert found == ["tables.ads", "tables.json", "tables.users"]


@pytest.mark.parametrize(("file_format", "module"), [("npz", "numpy"), ("parquet", "pyarrow")])
def test_a_missing_package_is_named(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: Any, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=f"{file_format}' needs {module}.*pip install"):
        checkpoint.export(path, tmp_path / "out", file_format=file_format)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="file_format is 'csv', expected 'npz' or 'parquet'"):
        checkpoint.export(path, out, file_format="csv")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tables has 'b', but the checkpoint has \['tables.ads'"):
        checkpoint.export(path, out, file_format="npz", tables=["b"])
    with pytest.raises(TypeError, match="state is 1"):
        checkpoint.export(path, out, file_format="npz", state=1)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="is not a checkpoint"):
        checkpoint.export(tmp_path, out, file_format="npz")
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        checkpoint.export(path, out, file_format="npz")


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize(("method", "call"), [("sync", 2), ("rename", 1), ("sync_folder", 6)])
def test_a_failure_leaves_nothing(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    call: int,
    error: BaseException,
) -> None:
    calls = 0

    def fail(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise copy.copy(error)  # one that was raised keeps the frames of the test
        return getattr(Disk(), method)(*arguments)

    disk = Disk()
    monkeypatch.setattr(disk, method, fail)
    monkeypatch.setattr(EXPORT, "_DISK", disk)
    with pytest.raises(type(error)):
        checkpoint.export(path, tmp_path / "out", file_format="npz")
    assert calls == call
    assert list(tmp_path.iterdir()) == []
