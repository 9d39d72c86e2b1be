"""Checkpoints of RecIS, written from its description: read, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_files import Rows, some_rows, write_recis
from table_rows import assert_holds

import torch_dynemb as td
from torch_dynemb import migrate, recis
from torch_dynemb.table.content import optimizer_steps

pytestmark = pytest.mark.cpu_only("files, which are read on the CPU")

DIM = 6


def table(**arguments: Any) -> td.DynamicEmbedding:
    given: dict[str, Any] = {"optimizer": td.Adagrad(lr=0.1), **arguments}
    return td.DynamicEmbedding(DIM, **given)


def adagrad(rows: Rows) -> dict[str, Any]:
    return {"sparse_adagrad_state_sum": rows.state["sum"]}


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_state_and_steps_of_all_ranks(tmp_path: Path, ranks: int) -> None:
    rows, items = some_rows(500, DIM), table()
    dense = {
        "sparse_adagrad_step": np.array([41], np.int64),
        "tower.weight": np.ones((2, 2), np.float32),
        "mask": np.ones(3, np.bool_),  # of which RecIS writes a dtype that safetensors has not
    }
    write_recis(tmp_path, "user_id", rows, ranks=ranks, slots=adagrad(rows), dense=dense)
    report = migrate.load(items, migrate.read_recis(tmp_path, "user_id"), batch_size=64)
    assert report == {"embedding": (500, (), ())}
    assert_holds(items, rows)
    assert optimizer_steps(items.group.tables, 0) == 41


@pytest.mark.parametrize("kind", ["adam", "adamw", "adamw_tf"])
def test_adam_and_kin(tmp_path: Path, kind: str) -> None:
    rows = some_rows(100, DIM)
    rows.state = {"exp_avg": rows.values * 2, "exp_avg_sq": rows.values**2}
    slots = {f"sparse_{kind}_{name}": values for name, values in rows.state.items()}
    dense = {f"sparse_{kind}_step": np.array([7], np.int64)}
    write_recis(tmp_path, "user_id", rows, slots=slots, dense=dense)
    optimizer = {"adam": td.Adam, "adamw": td.AdamW, "adamw_tf": td.AdamWTF}[kind]
    items = table(optimizer=optimizer(lr=0.1))
    migrate.load(items, migrate.read_recis(tmp_path, "user_id"))
    assert_holds(items, rows)
    assert optimizer_steps(items.group.tables, 0) == 7


def test_row_wise_adagrad_and_the_steps_of_a_filter(tmp_path: Path) -> None:
    rows = some_rows(100, DIM, per_row=True)
    rows.scores = {"step": np.arange(100)}
    slots = {
        "sparse_row_wise_adagrad_state_sum": rows.state["sum"],
        "step_filter": rows.scores["step"][:, None],
    }
    dense = {"sparse_row_wise_adagrad_user_id_step": np.array([9], np.int64)}
    write_recis(tmp_path, "user_id", rows, ranks=2, slots=slots, dense=dense)
    items = table(optimizer=td.RowWiseAdagrad(lr=0.1), policy=td.Policy(score="step"))
    migrate.load(items, migrate.read_recis(tmp_path, "user_id"))
    assert_holds(items, rows, scores=("step",))
    assert items.group.steps == 99


def test_rows_of_16_bits(tmp_path: Path) -> None:
    rows = some_rows(50, DIM)
    rows.values = rows.values.astype(np.float16)
    write_recis(tmp_path, "user_id", rows, slots={})
    items = table()
    migrate.load(items, migrate.read_recis(tmp_path, "user_id"))
    assert_holds(items, Rows(rows.ids, rows.values.astype(np.float32)), state=False)


def test_into_an_engine_by_the_name_of_the_child(tmp_path: Path) -> None:
    rows = some_rows(60, DIM)
    write_recis(tmp_path, "user_id", rows, ranks=2, slots={})
    options = {
        name: recis.EmbeddingOption(embedding_dim=DIM, shared_name=name)
        for name in ("user_id", "item_id")
    }
    engine = recis.EmbeddingEngine(options)
    migrate.load(engine, {"user_id": migrate.read_recis(tmp_path, "user_id")})
    assert_holds(engine, rows, table="user_id", state=False)


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def rename_slot(folder: Path) -> None:
    path = folder / "tensorkey.json"
    path.write_text(path.read_text().replace("@sparse_adagrad_state_sum", "@my_filter"))


FIRST, SECOND = (f"model-{rank:06}-of-000002.safetensors" for rank in range(2))
DAMAGE = {
    "a file is missing": (
        lambda folder: (folder / SECOND).unlink(),
        "no file model-.* has it: files are missing",
    ),
    "a file is cut off": (
        lambda folder: cut(folder / SECOND, (folder / SECOND).stat().st_size - 1),
        f"{SECOND} is damaged or cut off: .* ends at byte",
    ),
    "a header is cut off": (lambda folder: cut(folder / FIRST, 100), f"{FIRST} is damaged or cut"),
    "an empty file": (lambda folder: cut(folder / FIRST, 0), f"{FIRST} is damaged or cut off"),
    "keys of one rank": (
        lambda folder: (folder / "tensorkey.json").write_text(
            json.dumps(
                {
                    name: of
                    for name, of in json.loads((folder / "tensorkey.json").read_text()).items()
                    if not name.endswith("part_1_2")
                }
            )
        ),
        "table 'user_id' has no ids of slots from 32768 on: the files of a rank are missing",
    ),
    "keys that are cut off": (
        lambda folder: cut(folder / "tensorkey.json", 50),
        "tensorkey.json is damaged",
    ),
    "an unknown slot": (rename_slot, r"has a slot 'my_filter', .*left_out=\['my_filter'\]"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_refused(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    rows = some_rows(40, DIM)
    write_recis(tmp_path, "user_id", rows, ranks=2, slots=adagrad(rows))
    damage(tmp_path)
    items = table()
    with pytest.raises(ValueError, match=message):
        migrate.load(items, migrate.read_recis(tmp_path, "user_id"))
    assert len(items) == 0


def test_slots_can_be_left_out(tmp_path: Path) -> None:
    rows, items = some_rows(40, DIM), table()
    write_recis(tmp_path, "user_id", rows, slots={"my_filter": np.ones((40, 1), np.int64)})
    migrate.load(items, migrate.read_recis(tmp_path, "user_id", left_out=["my_filter"]))
    assert_holds(items, rows, state=False)


def test_rows_of_8_bits_and_other_tables_are_refused(tmp_path: Path) -> None:
    rows = some_rows(40, DIM)
    rows.values = np.ones((40, DIM), np.int8)
    write_recis(tmp_path, "user_id", rows, slots={})
    with pytest.raises(ValueError, match=r"rows of table 'user_id' are torch.int8 \[40, 6\]"):
        migrate.read_recis(tmp_path, "user_id")
    with pytest.raises(FileNotFoundError, match=r"has no table 'ads', only \['user_id'\]"):
        migrate.read_recis(tmp_path, "ads")
    with pytest.raises(FileNotFoundError, match=r"is not a checkpoint of RecIS: it has no tensork"):
        migrate.read_recis(tmp_path / "nowhere", "ads")
    with pytest.raises(TypeError, match="left_out is 'x', expected a list"):
        migrate.read_recis(tmp_path, "user_id", left_out="x")


def test_64_bits_of_ids_stay(tmp_path: Path) -> None:
    rows, items = some_rows(10, DIM), table()
    write_recis(tmp_path, "user_id", rows, slots={})
    migrate.load(items, migrate.read_recis(tmp_path, "user_id"))
    assert torch.iinfo(torch.int64).min in items
