"""Crafted checkpoints with right checksums: an error or a sound model, no crash."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import pytest
from hand_written import outcome
from torch import Tensor
from whole_model import KINDS, save_trained

from torch_dynemb import checkpoint
from torch_dynemb.ops.columns import BUCKET_WIDTH, FREE_STEP, GENERATION_BITS, Slab, Table

pytestmark = pytest.mark.any_device

BAG = "bag/r000-of-001.c000-004.p0000.safetensors"
SCORED = "tables.scored/r000-of-001.c000-004.p0000.safetensors"
COUNTED = "tables.counted/counts-r000-of-001.c000-004.safetensors"
SKETCHED = "tables.sketched/sketch-r000-of-001.safetensors"
GROUP = "groups/r000-of-001.g000.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained(tmp_path_factory.mktemp("saved") / "last")


# -- values of tensors ---------------------------------------------------------------------------


def put(place: Any, value: int) -> Callable[[Tensor], None]:
    def change(values: Tensor) -> None:
        values[place] = value

    return change


def twice(values: Tensor) -> None:
    values[1] = values[0]


def stored(buckets: Tensor) -> Tensor:
    """Places of the stored words of ids, int64 [n, 2]."""
    places = (buckets[:, BUCKET_WIDTH:] > 0).nonzero()
    places[:, 1] += BUCKET_WIDTH
    return places


def stored_word(word: int) -> Callable[[Tensor], None]:
    def change(buckets: Tensor) -> None:
        buckets[tuple(stored(buckets)[0])] = word

    return change


def without_generation(buckets: Tensor) -> None:
    place = tuple(stored(buckets)[0])
    buckets[place] = ((buckets[place] - 1) >> GENERATION_BITS << GENERATION_BITS) + 1


def of_one_row(buckets: Tensor) -> None:
    first, second = stored(buckets)[:2]
    buckets[tuple(second)] = buckets[tuple(first)]


def another_id(buckets: Tensor) -> None:
    bucket, word = stored(buckets)[0]
    buckets[bucket, word - BUCKET_WIDTH] = 12345


def all_scores(word: int, value: int) -> Callable[[Tensor], None]:
    def change(scores: Tensor) -> None:
        of_word = scores[:, word * BUCKET_WIDTH : (word + 1) * BUCKET_WIDTH]
        of_word[(of_word != 0) & (of_word != FREE_STEP)] = value

    return change


BUCKETS, COUNTS, SCORES, FREE = (
    "scored.buckets",
    "counted.counts",
    "scored.scores",
    "dim4.free_rows",
)
# file, tensor, change, which models notice, what they say
TENSORS: dict[str, tuple[str, str, Callable[[Tensor], None], str, str]] = {
    "an id twice": (BAG, "id", twice, "other", "an id twice"),
    "an id elsewhere": (GROUP, BUCKETS, another_id, "exact", "where no lookup finds them"),
    "a row beyond": (
        GROUP,
        BUCKETS,
        stored_word(1 << 60),
        "exact",
        "has row 4294967295",
    ),
    "a negative word": (GROUP, BUCKETS, stored_word(-1), "exact", "the stored word -1"),
    "a row twice": (GROUP, BUCKETS, of_one_row, "exact", "a row that another one has"),
    "generation 0": (GROUP, BUCKETS, without_generation, "exact", "generation 0, expected 1"),
    "an id less": (GROUP, BUCKETS, stored_word(0), "exact", "tombstones, but 'tables' says"),
    "a negative step": (SCORED, "score.step", put(3, -4), "other", "an id of step -4"),
    "a negative step in the index": (GROUP, SCORES, all_scores(0, -4), "exact", "has step -4"),
    "a negative frequency": (SCORED, "score.frequency", put(3, -4), "other", "frequency -4"),
    "a negative frequency in the index": (
        GROUP,
        SCORES,
        all_scores(2, -4),
        "exact",
        "frequency -4",
    ),
    "rows of fewer than no steps": (SCORED, "state.step", put(0, -1), "", "'state.step'"),
    "a negative count": (COUNTED, "count", put(0, -1), "other", "the count -1 of an id"),
    "count 0": (COUNTED, "count", put(0, 0), "other", "the count 0 of an id"),
    "a count beyond": (COUNTED, "count", put(0, (1 << 62) + 1), "other", "the count 46116"),
    "a count beyond in the index": (
        GROUP,
        COUNTS,
        stored_word((1 << 62) + 1),
        "exact",
        "above 2.62: 46116",
    ),
    "an id counted twice": (COUNTED, "id", twice, "other", "two counts of an id"),
    "a negative sketch": (SKETCHED, "sketch", put((0, 0), -1), "other", "'sketch'.*negative"),
    "buckets beyond": (GROUP, "tables", put((0, Table.BUCKET_COUNT), 1 << 40), "exact", "buckets"),
    "no buckets": (GROUP, "tables", put((0, Table.BUCKET_COUNT), 0), "exact", "'tables' says 0"),
    "more ids": (GROUP, "tables", put((1, Table.SIZE), 9), "exact", "9 ids in"),
    "more tombstones": (GROUP, "tables", put((0, Table.TOMBSTONES), 999), "exact", "tombstones"),
    "a negative counter": (GROUP, "tables", put((0, Table.FOUND), -1), "exact", "FOUND"),
    "rows beyond": (
        GROUP,
        "slabs",
        put((0, Slab.NEXT_ROW), 1 << 40),
        "exact",
        "1099511627776 rows",
    ),
    "more free rows": (GROUP, "slabs", put((0, Slab.FREE_COUNT), 77), "exact", "'slabs' says 77"),
    "a generation beyond": (GROUP, "slabs", put((0, Slab.GENERATION), 1 << 40), "exact", "GENER"),
    "rows committed": (
        GROUP,
        "slabs",
        put((0, Slab.COMMITTED_ROWS), 1 << 40),
        "exact",
        "COMMITTED",
    ),
    "a negative clock": (GROUP, "clock", put(0, -1), "exact", "'clock'"),
    "a negative row clock": (GROUP, "row_clock", put(0, -1), "exact", "'row_clock'"),
    "a negative cell": (GROUP, "sketch", put(0, -1), "exact", "'sketch'"),
    "another seed": (GROUP, "seeds", put(0, 3), "exact", "where no lookup finds them"),
    "a free row of an id": (
        GROUP,
        FREE,
        put(0, (1 << GENERATION_BITS) + 1),
        "exact",
        "a row that another one has",
    ),
    "a free row beyond": (GROUP, FREE, put(0, 1 << 62), "exact", "has row 17179869184"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_impossible_value_is_refused(case: str, saved: Path, tmp_path: Path) -> None:
    file, name, change, noticed_by, match = TENSORS[case]
    path = damage.copied(saved, tmp_path / "last")
    damage.change_tensor(path / checkpoint.open(path).uuid / file, name, change)
    damage.seal(path)
    for kind in KINDS:
        other = "other" in kind
        told = outcome(path, kind, case)
        if noticed_by != ("exact" if other else "other"):
            assert told, f"{kind}: loaded"
            with pytest.raises(ValueError, match=match):
                raise ValueError(told)


def test_an_id_twice_in_different_batches_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_is_first(values: Tensor) -> None:
        values[-1] = values[0]

    path = damage.copied(saved, tmp_path / "last")
    damage.change_tensor(path / checkpoint.open(path).uuid / BAG, "id", last_is_first)
    damage.seal(path)
    monkeypatch.setattr(sys.modules["torch_dynemb.rows.loader"], "_IDS_AT_ONCE", 8)
    for kind in KINDS:
        told = outcome(path, kind, "an id twice")
        assert "other" not in kind or "twice" in told


# -- the manifest --------------------------------------------------------------------------------

PART = ("tables", "bag", "parts", 0)
FILE = (*PART, "rows", 0)
MANIFESTS: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "a path outside": ((*FILE, "path"), "../last/" + BAG, "a path within the checkpoint"),
    "an absolute path": ((*FILE, "path"), "/etc/passwd", "a path within the checkpoint"),
    "more rows": ((*FILE, "rows"), 1 << 40, "rows for"),
    "blocks of nothing": ((*FILE, "block_bytes"), 0, "block_bytes"),
    "too few checksums": ((*FILE, "crc32c"), [], "0 checksums for 1 blocks"),
    "more ids": ((*PART, "ids"), 99, "rows for 99 ids"),
    "no such group": ((*PART, "group"), 2, "expected a whole number from -1 to 1"),
    "no such slots": ((*PART, "slots_end"), 2, "slots_end"),
    "only some slots": ((*PART, "slots"), 4, "no ids of slots 1 to 4"),
    "only some columns": ((*PART, "columns"), 2, "expected all of 4"),
    "columns beyond": ((*PART, "first_column"), 4, "first_column"),
    "no parts": (("tables", "bag", "parts"), [], "has no parts"),
    "no dtype": (("tables", "bag", "dtype"), "int64", "dtype"),
    "a seed beyond": (("tables", "bag", "seed"), 1 << 63, "seed"),
    "an unknown score": (("tables", "bag", "scores"), ["size"], "scores"),
    "an optimizer without state": (("tables", "bag", "optimizer"), {"name": "SGD"}, "optimizer"),
    "counters": ((*PART, "counters"), [0] * 15, "16 numbers"),
    "another kind": (("kind",), "part", "kind is 'part', expected"),
    "an increment of nothing": (("kind",), "delta", "increments have one"),
    "a file of the dense state": (("dense", "entries", "dense.bias", 0, "file"), 1, "file"),
    "a dense tensor": (("dense", "entries", "dense.bias", 0, "tensor"), "x", "lacks 'x'"),
    "a huge tensor": (("state", "entries", "state.more", 0, "sizes"), [1 << 50], "piece at"),
    "no pieces": (("state", "entries", "state.more"), [], "no pieces"),
    "no skeleton": (("state", "values"), {"dict": 3}, "cannot be rebuilt"),
    "no such tensor": (("state", "values"), {"tensor": "x"}, "cannot be rebuilt"),
    "an unknown entry": (("tables", "bag", "colour"), 1, "an entry is missing or wrong"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_impossible_manifest_is_refused(case: str, saved: Path, tmp_path: Path) -> None:
    place, value, match = MANIFESTS[case]
    path = damage.copied(saved, tmp_path / "last")
    content = damage.read_manifest_text(path)
    damage.replaced(content, place, value)
    damage.write_manifest(path, content)
    told = outcome(path, "empty", case)
    assert str(path) in told
    assert match in told


def test_pieces_that_leave_a_hole_are_refused(saved: Path, tmp_path: Path) -> None:
    path = damage.copied(saved, tmp_path / "last")
    content = damage.read_manifest_text(path)
    (piece,) = content["state"]["entries"]["state.more"]
    pieces = [{**piece, "offsets": [0], "sizes": [20]}] * 2
    content["state"]["entries"]["state.more"] = pieces
    damage.write_manifest(path, content)
    assert "10 saved elements, too few for (20,)" in outcome(path, "empty", "a hole")
