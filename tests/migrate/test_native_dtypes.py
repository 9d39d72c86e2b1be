"""Dtypes of DynamicEmb's dumps: of rows and of optimizer state, read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_files import some_rows, write_dynamicemb

import torch_dynemb as td
from torch_dynemb import migrate
from torch_dynemb.migrate.dynamicemb_calls import DynamicEmbDump, DynamicEmbLoad
from torch_dynemb.table.content import read_content

pytestmark = pytest.mark.cpu_only("files, which are read on the CPU")

DIM = 6
END = ".rank_0.world_size_1"


def table(**arguments: Any) -> td.DynamicEmbedding:
    return td.DynamicEmbedding(DIM, **{"optimizer": td.Adagrad(lr=0.1), **arguments})


@pytest.mark.parametrize("named", [True, False])
def test_rows_of_16_bits(tmp_path: Path, named: bool) -> None:
    ids, rows = torch.arange(100, 103), torch.randn(3, DIM).to(torch.bfloat16)
    end = ".rank_0.world_size_1"
    ids.numpy().tofile(tmp_path / f"users_emb_keys{end}")
    rows.view(torch.int16).numpy().tofile(tmp_path / f"users_emb_values{end}")
    options = {"embedding_dtype": "bfloat16", "embedding_dim": DIM} if named else {}
    (tmp_path / "users_opt_args.json").write_text(json.dumps(options))
    items = table()
    if not named:
        with pytest.raises(ValueError, match=r"has 6 columns.*have 3.*another value_dtype"):
            migrate.load(items, migrate.read_dynamicemb(tmp_path, "users"))
    given = None if named else torch.bfloat16
    migrate.load(items, migrate.read_dynamicemb(tmp_path, "users", value_dtype=given))
    assert torch.equal(items.group.read(0, ids), rows.float())


def write_native(
    folder: Path, rows: torch.Tensor, state: torch.Tensor, options: dict[str, Any]
) -> None:
    """A dump as DynamicEmb writes it since September 2026, by the bytes of its tensors."""
    options |= {"embedding_dtype": str(rows.dtype)[6:], "embedding_dim": rows.shape[1]}
    options["optim_state_dtype"] = str(state.dtype)[6:]
    (folder / "users_opt_args.json").write_text(json.dumps(options))
    ids = torch.arange(100, 100 + len(rows))
    for item, values in (("keys", ids), ("values", rows), ("opt_values", state)):
        data = values.contiguous().view(torch.uint8).numpy()
        data.tofile(folder / f"users_emb_{item}{END}")


@pytest.mark.parametrize(
    ("optimizer", "kind", "names", "state_dtype"),
    [
        (td.Adagrad(lr=0.1), "exact_adagrad", ("sum",), torch.bfloat16),
        (td.Ftrl(lr=0.1), "ftrl", ("linear", "sum"), torch.bfloat16),
        (td.RowWiseAdagrad(lr=0.1), "exact_row_wise_adagrad", ("sum",), torch.float32),
    ],
)
def test_rows_and_state_of_their_own_dtypes(
    tmp_path: Path, optimizer: Any, kind: str, names: tuple[str, ...], state_dtype: torch.dtype
) -> None:
    width = 1 if "row" in kind else DIM
    rows = torch.randn(9, DIM).to(torch.bfloat16)
    state = torch.rand(9, width * len(names)).to(state_dtype)
    write_native(tmp_path, rows, state, {"opt_type": kind})
    items = table(optimizer=optimizer)
    migrate.load(items, migrate.read_dynamicemb(tmp_path, "users"))
    content = read_content(items.group.tables, 0)
    assert torch.equal(content.rows, rows.float())
    for name, values in zip(names, state.float().split(width, 1), strict=True):
        assert torch.equal(content.state[name], values)


def test_a_dtype_or_dim_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    rows = some_rows(5, DIM)
    for options, message in (
        ({"embedding_dtype": "int8"}, r"embedding_dtype is 'int8', expected one of.*value_dtype"),
        ({"embedding_dtype": "float8_e4m3fn"}, r"float8_e4m3fn', .*a table of torch.bfloat16, and"),
        ({"optim_state_dtype": "int8"}, r"optim_state_dtype is 'int8'.*remove the files of state"),
        ({"embedding_dim": DIM + 1}, r"rows of 6 values of torch.float32, but .*embedding_dim 7"),
    ):
        write_dynamicemb(
            tmp_path, "users", rows, options={"opt_type": "exact_adagrad", **options}, state=["sum"]
        )
        with pytest.raises(ValueError, match=message):
            migrate.read_dynamicemb(tmp_path, "users")
    with pytest.raises(ValueError, match=r"value_dtype is torch.int8, expected one of"):
        migrate.read_dynamicemb(tmp_path, "users", value_dtype=torch.int8)


def test_a_dump_keeps_dtypes_where_asked(tmp_path: Path) -> None:
    optimizer = td.Adagrad(lr=0.5, state_dtype=torch.bfloat16)
    items, other = (table(optimizer=optimizer, dtype=torch.float16) for _ in range(2))
    ids = torch.arange(5)
    items(ids).square().sum().backward()
    DynamicEmbDump(tmp_path, items, optim=True, native_dtype=True)
    folder, content = tmp_path / "model", read_content(items.group.tables, 0)
    values = np.fromfile(folder / f"embedding_emb_values{END}", np.float16)
    assert np.array_equal(values.reshape(-1, DIM), content.rows.numpy())
    state = torch.from_file(
        str(folder / f"embedding_emb_opt_values{END}"), size=5 * DIM, dtype=torch.bfloat16
    )
    assert torch.equal(state.view(-1, DIM), content.state["sum"])
    options = json.loads((folder / "embedding_opt_args.json").read_text())
    dtypes = options["embedding_dtype"], options["optim_state_dtype"]
    assert dtypes == ("float16", "bfloat16")
    DynamicEmbLoad(tmp_path, other, optim=True)
    theirs = read_content(other.group.tables, 0)
    assert torch.equal(theirs.rows, content.rows)
    assert torch.equal(theirs.state["sum"], content.state["sum"])
