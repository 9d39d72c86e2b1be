"""Batches with right checksums and wrong content: named errors, in bounded memory."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch
from logged_batches import BASE, logged_table
from torch import Tensor

from torch_dynemb.changes.batch import (
    DENSE,
    ERASE,
    ROWS,
    TABLES,
    Batch,
    Head,
    Pieces,
    as_tensor,
    decoded,
    encoded,
)
from torch_dynemb.changes.commits import commit_of
from torch_dynemb.changes.payloads import of_tables, of_tensors, tensors_of
from torch_dynemb.checkpoint import DamagedFileError
from torch_dynemb.delta_log import Commit

pytestmark = pytest.mark.cpu_only("about files, without tables")

TABLE: dict[str, Any] = {"name": "t", **asdict(logged_table())}
PART: dict[str, Any] = TABLE["parts"][0]
IDS = torch.arange(3)


def batch(*records: tuple[int, int, bytes]) -> Batch:
    pieces = [Pieces.of(kind, table, [as_tensor(data)]) for kind, table, data in records]
    data, _ = encoded(Head(0, 1, 0, BASE, 0, 1, 1, 0, 0), pieces)
    return decoded(data)


def tables(*changes: Mapping[str, Any]) -> tuple[int, int, bytes]:
    described = []
    for change in changes or ({},):
        part = {"parts": [PART | {name: of for name, of in change.items() if name in PART}]}
        of_table = {name: of for name, of in change.items() if name not in PART}
        described.append(TABLE | part | of_table)
    return TABLES, 0, json.dumps(described).encode()


def tensors(kind: int, table: int = 0, **values: Tensor) -> tuple[int, int, bytes]:
    return kind, table, b"".join(bytes(of.reshape(-1).view(torch.uint8)) for of in pieces(values))


def pieces(values: dict[str, Tensor]) -> list[Tensor]:
    return [piece.contiguous() for piece in of_tensors(values)]


def rows(**changes: Tensor) -> tuple[int, int, bytes]:
    return tensors(ROWS, **({"id": IDS, "weight": torch.ones(3, 4)} | changes))


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def test_what_is_right_is_understood() -> None:
    scores = {"score.custom": IDS, "state.m": torch.ones(3, 4), "state.step": torch.ones(3)}
    commit: Commit = commit_of([batch(tables(), rows(**scores), tensors(ERASE, id=IDS))])
    delta = commit.tables["t"]
    assert delta.changed.scores["custom"].tolist() == IDS.tolist()
    assert sorted(delta.changed.state) == ["m", "step"]
    assert delta.changed.rows.shape == (3, 4)


BOMB = b"[" + b"{}," * (6 << 20) + b"{}]"
OVERLAPPING = json.dumps(
    {f"{k}": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]} for k in range(99)}
).encode()
CRAFTED: dict[str, list[tuple[int, int, bytes]]] = {
    "no JSON": [(TABLES, 0, b"{")],
    "a list of lists": [(TABLES, 0, b"[[]]")],
    "deep": [(TABLES, 0, b"[" * 100_000)],
    "a bomb": [(TABLES, 0, BOMB)],
    "no list": [(TABLES, 0, b"7")],
    "half a table": [(TABLES, 0, b'[{"name": "t"}]')],
    "a number for a name": [tables({"name": 7})],
    "a text for columns": [tables({"columns": "4"})],
    "negative columns": [tables({"columns": -1})],
    "endless columns": [tables({"columns": 1 << 62})],
    "no parts": [tables({"parts": []})],
    "a part with files": [
        tables({"counts": {"path": "c", "rows": 0, "bytes": 0, "block_bytes": 8, "crc32c": []}})
    ],
    "columns that lack": [tables({"embedding_dim": 5})],
    "no such table": [tables(), tensors(ERASE, 1, id=IDS)],
    "no ids": [tables(), tensors(ERASE, weight=IDS)],
    "ids of floats": [tables(), rows(id=IDS.float())],
    "ids of two dimensions": [tables(), tensors(ERASE, id=IDS[:, None])],
    "fewer rows": [tables(), rows(weight=torch.ones(2, 4))],
    "narrower rows": [tables(), rows(weight=torch.ones(3, 3))],
    "rows of another dtype": [tables(), rows(weight=torch.ones(3, 4).half())],
    "fewer states": [tables(), rows(**{"state.m": torch.ones(2, 4)})],
    "fewer scores": [tables(), rows(**{"score.custom": IDS[:2]})],
    "scores of floats": [tables(), rows(**{"score.custom": IDS.float()})],
    "ranks with other ids": [
        tables({"columns": 2}, {"columns": 2, "first_column": 2}),
        tensors(ROWS, 0, id=IDS, weight=torch.ones(3, 2)),
        tensors(ROWS, 1, id=IDS + 1, weight=torch.ones(3, 2)),
    ],
    "an unknown kind": [(11, 0, b"")],
    "no header": [(DENSE, 0, b"1234567")],
    "an endless header": [(DENSE, 0, (1 << 62).to_bytes(8, "little"))],
    "a long header": [(DENSE, 0, header(b" " * (17 << 20)))],
    "a header of a list": [(DENSE, 0, header(b"[[1]]"))],
    "tensors that overlap": [(DENSE, 0, header(OVERLAPPING) + bytes(4096))],
    "a tensor that is too long": [
        (
            DENSE,
            0,
            header(b'{"a":{"dtype":"U8","shape":[4611686018427387904],"data_offsets":[0,8]}}'),
        )
    ],
}


@pytest.mark.parametrize("records", CRAFTED.values(), ids=CRAFTED)
def test_crafted_records_are_errors_that_name_the_commit(
    records: list[tuple[int, int, bytes]],
) -> None:
    crafted = batch(*records)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFileError, match=r"commit 1 cannot be decoded: "):
            commit_of([crafted])
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_what_no_reader_takes_is_not_published() -> None:
    many = {f"{number:0>2000000}": torch.empty(0) for number in range(9)}
    with pytest.raises(ValueError, match="publish fewer tables and dense tensors in one log"):
        of_tensors(many)
    assert of_tables([]).bytes == 2


def test_altered_payloads_are_understood_or_refused() -> None:
    draw = random.Random(5)
    records = [tables(), rows(**{"state.m": torch.ones(3, 4), "score.custom": IDS})]
    records += [tensors(ERASE, id=IDS), tensors(DENSE, a=torch.ones(2), b=torch.ones(3, 2))]
    refused = 0
    for _ in range(500):
        altered = list(records)
        number = draw.randrange(len(altered))
        kind, table, data = altered[number]
        text = bytearray(data)
        for _ in range(draw.choice([1, 1, 2, 8])):
            at = draw.randrange(min(len(text), 400))
            text[at] = draw.choice([draw.randrange(256), 0, 0xFF, *b'-019[]{},":'])
        altered[number] = kind, table, bytes(text[: draw.choice([len(text)] * 3 + [at])])
        try:
            commit = commit_of([batch(*altered)])
        except DamagedFileError:
            refused += 1
        else:
            for delta in commit.tables.values():
                assert delta.changed.rows.shape[0] == delta.changed.ids.shape[0]
    assert 100 < refused < 500
    assert len(tensors_of(torch.cat([of.view(torch.uint8).reshape(-1) for of in pieces({})]))) == 0
