"""``DeltaLog(rows=)``: commits with rows of int8 or fp16, which take fewer bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_content import ColumnShards
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import delta_log, errors, ops
from torch_dynemb.delta_log import Commit, DeltaLog
from torch_dynemb.ops.columns import RowFormat
from torch_dynemb.parts.table_parts import TablePart

pytestmark = pytest.mark.any_device

FORMS = ("int8", "fp16")


def table(dim: int = 16, **options: object) -> td.DynamicEmbedding:
    torch.manual_seed(0)
    options = {"optimizer": td.SGD(lr=0.1), "name": "items", **options}
    return td.DynamicEmbedding(dim, **options)  # type: ignore[arg-type]


def step(model: torch.nn.Module, first: int) -> None:
    ids = torch.arange(first, first + 30)
    rows = model(ids)
    (rows * torch.randn_like(rows)).sum().backward()
    model.optimizer.step()


def rows_of(model: td.DynamicEmbedding, ids: Tensor) -> Tensor:
    rows: Tensor = model.eval()(ids).detach()
    model.train()
    return rows


def expected(rows: Tensor, form: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows as a table of this dtype gets them from a log of this form."""
    if form == "fp16":
        return rows.half().to(dtype).float()
    packed = ops.quantize_rows(rows.cpu(), RowFormat.INT8)
    values = ops.dequantize_rows(packed, RowFormat.INT8, rows.shape[1])
    return values.to(dtype).float().to(rows.device)


class PackedRows(torch.nn.Module):
    """A table with columns that are the bits of 8-bit rows, such as RecIS has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table()


def _packed_part(module: PackedRows, path: str) -> list[TablePart]:
    return [TablePart(path or "packed", module.table.group, 0, 16, 0, packed=True)]


td.register_module(PackedRows, tables=_packed_part)


class Keeps:
    """A target that keeps commits."""

    def __init__(self) -> None:
        self.commits: list[Commit] = []

    def check(self, commit: Commit) -> None:
        pass

    def apply(self, commit: Commit) -> None:
        self.commits.append(commit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_followers_of_floats_get_the_rows_of_the_form(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = table(dtype=dtype)
    with DeltaLog(tmp_path / "log", rows=form) as log:  # type: ignore[arg-type]
        log.attach(model)
        other, kept = table(dtype=dtype), Keeps()
        followers = [delta_log.follow(tmp_path / "log", of) for of in (other, kept)]
        for first in (0, 10):
            step(model, first)
            log.publish()
            log.flush()
            for follower in followers:
                follower.update()
            ids = torch.arange(first, first + 30)
            assert torch.equal(rows_of(other, ids), expected(rows_of(model, ids), form, dtype))
    delta = kept.commits[-1].tables["embedding"]
    assert delta.changed.rows.dtype == dtype
    assert (delta.quantized is not None) == (form == "int8")


def test_bytes(tmp_path: Path) -> None:
    sizes = {}
    for form in (None, *FORMS):
        model, path = table(64), tmp_path / f"{form}"
        with DeltaLog(path, rows=form) as log:  # type: ignore[arg-type]
            log.attach(model)
            model(torch.arange(5000)).sum().backward()
            model.optimizer.step()
            log.publish()
        sizes[form] = sum(file.stat().st_size for file in path.glob("r*/*.delta"))
    assert sizes["int8"] < 0.32 * sizes[None]  # with 8 bytes of the id, and 8 of scale and bias
    assert sizes["fp16"] < 0.53 * sizes[None]


def test_columns_of_several_shards(tmp_path: Path) -> None:
    model = ColumnShards([8, 4], td.SGD(lr=0.1))
    with DeltaLog(tmp_path / "log", rows="int8") as log:
        log.attach(model)
        other = ColumnShards([8, 4], td.SGD(lr=0.1))
        follower = delta_log.follow(tmp_path / "log", other)
        model.train_on(torch.arange(20))
        log.publish()
    follower.update()
    for mine, theirs in zip(other.shards, model.shards, strict=True):
        ids = torch.arange(20)
        assert torch.equal(rows_of(mine, ids), expected(rows_of(theirs, ids), "int8"))


def test_rows_beyond_the_range_are_not_published(tmp_path: Path) -> None:
    model = table()
    with DeltaLog(tmp_path / "log", rows="fp16") as log:
        log.attach(model)
        other = table()
        follower = delta_log.follow(tmp_path / "log", other)
        model.group.insert_or_assign(0, torch.tensor([7]), torch.full((1, 16), 1e6))
        with pytest.raises(ValueError, match="the row of id 7 of table 'embedding'"):
            log.publish()
        model.group.insert_or_assign(0, torch.tensor([7]), torch.ones(1, 16))
        log.publish()
    assert follower.update() == 1
    assert torch.equal(rows_of(other, torch.tensor([7])), torch.ones(1, 16))


def test_what_excludes_a_form(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resume is True and rows is 'int8'"):
        DeltaLog(tmp_path / "log", rows="int8", resume=True)
    with pytest.raises(ValueError, match="rows is 'int4', expected None or one of"):
        DeltaLog(tmp_path / "log", rows="int4")  # type: ignore[arg-type]
    packed = PackedRows()
    with pytest.raises(ValueError, match="trained with rows of 8 bits"):
        DeltaLog(tmp_path / "log", rows="int8").attach(packed)


def test_a_commit_that_is_larger_than_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = table(), table()
    with DeltaLog(tmp_path / "log") as log:
        log.attach(model)
        follower = delta_log.follow(tmp_path / "log", other)
        step(model, 0)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "available_memory", lambda: 4000)
            with pytest.raises(errors.HostMemoryError, match="the commit has 2") as raised:
                log.publish()
            assert raised.value.tables == ("embedding",)
        step(model, 20)
        log.publish()
    assert follower.update() == 1
    ids = torch.arange(50)
    assert torch.equal(rows_of(other, ids), rows_of(model, ids))
