"""The reader of Criteo files of the DLRM tutorial: round trips, positions, bad input."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutorials.dlrm.data import MISSING_ID, MISSING_INTEGER, CriteoReader, parse_lines
from tutorials.dlrm.job import files
from tutorials.dlrm.job.files import DataError, check_line, count_lines
from tutorials.dlrm.job.generate import format_lines, generate
from tutorials.dlrm.job.planted import CHUNK, PlantedConfig, PlantedModel, Samples

pytestmark = pytest.mark.cpu_only("the job of a tutorial, on the CPU")

INT64 = 1 << 63
HEX = "0123456789abcdef0123456789ABCDEF"

labels = st.sampled_from(["0", "1"])
integers = st.one_of(
    st.just(""),
    st.integers(-5, 5).map(str),
    st.integers(1 - INT64, INT64 - 1).map(str),
    st.sampled_from(["007", "-0", "0" * 21 + "5", "99999999", "-99999999", "100000000"]),
)
categories = st.one_of(
    st.just(""), st.text(HEX, min_size=8, max_size=8), st.text(HEX, min_size=1, max_size=16)
)
rows = st.tuples(
    labels,
    st.lists(integers, min_size=13, max_size=13),
    st.lists(categories, min_size=26, max_size=26),
).map(lambda row: [row[0], *row[1], *row[2]])


def good_line(label: str = "1") -> str:
    return "\t".join([label, *map(str, range(13)), *(f"{i:08x}" for i in range(26))])


def with_field(number: int, value: str) -> str:
    """Return a good line with one field, counted from 1, replaced."""
    fields = good_line().split("\t")
    fields[number - 1] = value
    return "\t".join(fields)


def write(path: Path, lines: list[str], *, end: str = "\n") -> Path:
    data = ("\n".join(lines) + end).encode("latin-1")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(reader: CriteoReader) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    batches = list(reader)
    assert all(len(b.labels) == reader.batch_size for b in batches[:-1])
    return (
        np.concatenate([np.empty(0), *(b.labels for b in batches)]),
        np.concatenate([np.empty((0, 13), np.int64), *(b.integers for b in batches)]),
        np.concatenate([np.empty((26, 0), np.int64), *(b.ids for b in batches)], axis=1),
    )


def signed(value: int) -> int:
    return value - (1 << 64) if value >= INT64 else value


def expected(table: list[list[str]]) -> tuple[list[float], list[list[int]], list[list[int]]]:
    """Parse with Python's own conversions."""
    return (
        [float(row[0]) for row in table],
        [[int(x) if x else MISSING_INTEGER for x in row[1:14]] for row in table],
        [[signed(int(x, 16)) if x else MISSING_ID for x in row[14:]] for row in table],
    )


def assert_samples(got: tuple[np.ndarray, ...], table: list[list[str]]) -> None:
    labels, integers, ids = expected(table)
    assert got[0].tolist() == labels
    assert got[1].tolist() == integers
    assert got[2].T.tolist() == ids


@pytest.mark.long
@settings(max_examples=60)
@given(
    table=st.lists(rows, min_size=1, max_size=12),
    batch_size=st.integers(1, 5),
    files=st.integers(1, 3),
    compressed=st.booleans(),
    newline_at_end=st.booleans(),
)
def test_reads_what_python_reads(
    tmp_path_factory, table, batch_size, files, compressed, newline_at_end
):
    folder = tmp_path_factory.mktemp("criteo")
    suffix = ".gz" if compressed else ""
    parts = [part.tolist() for part in np.array_split(np.array(table, dtype=object), files)]
    paths = [
        write(
            folder / f"part-{i}.tsv{suffix}",
            ["\t".join(row) for row in part],
            end="\n" if newline_at_end else "",
        )
        for i, part in enumerate(parts)
        if part
    ]
    assert_samples(read(CriteoReader(paths, batch_size)), table)
    assert count_lines(paths) == len(table)


def test_generator_to_reader(tmp_path):
    config = PlantedConfig(samples=3000, seed=5, cardinality_divisor=5000)
    data = generate(config, tmp_path)
    drawn = PlantedModel(config).draw(0, config.samples)
    got = read(CriteoReader([data.path], 256))
    np.testing.assert_array_equal(got[0], drawn.labels)
    np.testing.assert_array_equal(got[1], drawn.integers)
    np.testing.assert_array_equal(got[2], drawn.ids)
    np.testing.assert_array_equal(data.probabilities, drawn.probabilities)
    first_seen = [np.unique(ids, return_index=True)[1] for ids in drawn.ids]
    late = sum(int((first >= 1500).sum()) for first in first_seen)
    assert data.distinct_ids == sum(map(len, first_seen))
    assert data.late_share == late / data.distinct_ids > 0
    assert 0.5 < data.best_auc(2700) < 1
    assert np.any(drawn.integers == MISSING_INTEGER)
    assert np.any(drawn.ids == MISSING_ID)
    assert np.all((drawn.ids < 1 << 32) | (drawn.ids == MISSING_ID))


def test_generated_data_is_kept(tmp_path):
    config = PlantedConfig(samples=500, cardinality_divisor=5000)
    first = generate(config, tmp_path)
    written = first.path.stat()
    abandoned = tmp_path / (first.path.parent.name + ".partial")
    abandoned.mkdir()
    assert generate(config, tmp_path).path.stat().st_ino == written.st_ino
    other = generate(PlantedConfig(samples=500, seed=1, cardinality_divisor=5000), tmp_path)
    assert other.path != first.path
    assert other.path.read_bytes() != first.path.read_bytes()
    # The same configuration elsewhere, over what a killed process left behind: the same bytes.
    again = tmp_path / "elsewhere" / (first.path.parent.name + ".partial")
    again.mkdir(parents=True)
    (again / "samples.tsv").write_text("half a li")
    assert generate(config, again.parent).path.read_bytes() == first.path.read_bytes()
    assert not again.exists()


def test_samples_do_not_depend_on_what_else_is_drawn():
    model = PlantedModel(PlantedConfig(samples=CHUNK + 100, cardinality_divisor=5000))
    together, alone = model.draw(0, CHUNK + 100), model.draw(CHUNK, CHUNK + 50)
    np.testing.assert_array_equal(together.labels[CHUNK : CHUNK + 50], alone.labels)
    np.testing.assert_array_equal(together.integers[CHUNK : CHUNK + 50], alone.integers)
    np.testing.assert_array_equal(together.ids[:, CHUNK : CHUNK + 50], alone.ids)
    np.testing.assert_array_equal(together.probabilities[CHUNK : CHUNK + 50], alone.probabilities)


def test_generator_refuses_what_it_cannot_write():
    samples = Samples(
        np.zeros(1, np.float32),
        np.zeros((1, 13), np.int64),
        np.full((26, 1), 1 << 32),
        np.zeros(1),
    )
    with pytest.raises(ValueError, match=re.escape("samples.ids")):
        format_lines(samples)


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"seed": -1}, {"cardinality_divisor": 0.5}, {"turnover": 300}]
)
def test_generator_refuses_bad_configurations(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} must be .* got "):
        PlantedConfig(**wrong)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_default_data_is_as_promised(seed):
    from tutorials.dlrm.metrics import exact_auc

    config = PlantedConfig(seed=seed)
    samples = PlantedModel(config).draw(0, config.samples)
    distinct = late = 0
    for ids in samples.ids:
        first = np.unique(ids, return_index=True)[1]
        distinct += len(first)
        late += int((first >= config.samples // 2).sum())
    held_out = slice(config.samples * 9 // 10, None)
    assert config.samples >= 1_000_000
    assert distinct >= 1_000_000
    assert late >= 0.2 * distinct
    assert 0.80 <= exact_auc(samples.labels[held_out], samples.probabilities[held_out]) <= 0.86


def test_missing_id_is_above_every_category_of_eight_digits():
    assert 1 << 32 < MISSING_ID < INT64


def test_position_after_any_batch_continues_the_stream(tmp_path):
    lines = [with_field(15, f"{i:x}") for i in range(23)]
    bad = [*lines[:7], "x", *lines[7:9], "", *lines[9:]]
    paths = [
        write(tmp_path / "a.tsv", bad[:9], end=""),
        write(tmp_path / "empty.tsv", [], end=""),
        write(tmp_path / "b.tsv.gz", bad[9:]),
    ]
    reader = CriteoReader(paths, 4, on_bad_line="skip")
    batches, positions = [], [reader.position]
    for batch in reader:
        batches.append(batch)
        positions.append(reader.position)
    assert len(batches) == 6
    for done, position in enumerate(positions):
        rest = CriteoReader(paths, 4, start=position, on_bad_line="skip")
        for ours, theirs in zip(rest, batches[done:], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a, b)
        assert rest.position == reader.position
    assert reader.position.line == 25
    assert reader.position.skipped == 3
    assert reader.first_skipped is not None
    assert reader.first_skipped.startswith(f"{paths[0]}:8: too few fields")


@pytest.mark.parametrize("stop", [0, 1, 7, 8, 12, 13])
def test_stop_line_cuts_the_stream_in_two(tmp_path, stop):
    table = [with_field(15, f"{i:x}").split("\t") for i in range(13)]
    lines = ["\t".join(row) for row in table]
    paths = [write(tmp_path / "a.tsv", lines[:8]), write(tmp_path / "b.tsv", lines[8:])]
    before = CriteoReader(paths, 5, stop_line=stop)
    assert_samples(read(before), table[:stop])
    assert before.position.line == stop
    assert_samples(read(CriteoReader(paths, 5, start=before.position)), table[stop:])


@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("stop", [None, 1, 12])
@pytest.mark.parametrize("bad", [False, True])
def test_parts_are_the_batches_of_one_reader(tmp_path, parts, stop, bad):
    lines = [with_field(15, f"{i:x}") for i in range(23)]
    if bad:
        lines[4] = "junk"
    paths = [
        write(tmp_path / "a.tsv", lines[:9], end=""),
        write(tmp_path / "b.tsv.gz", lines[9:]),
    ]
    skip = {"on_bad_line": "skip" if bad else "error", "stop_line": stop}
    one = CriteoReader(paths, 5, **skip)
    readers = [CriteoReader(paths, 5, **skip, part=part, parts=parts) for part in range(parts)]
    for whole, *batches in zip(one, *readers, strict=True):
        assert whole.whole == len(whole.labels)
        for part, batch in enumerate(batches):
            assert batch.whole == whole.whole
            np.testing.assert_array_equal(batch.labels, whole.labels[part::parts])
            np.testing.assert_array_equal(batch.integers, whole.integers[part::parts])
            np.testing.assert_array_equal(batch.ids, whole.ids[:, part::parts])
        assert all(reader.position == one.position for reader in readers)


def test_a_part_finds_its_own_bad_lines(tmp_path):
    path = write(tmp_path / "a.tsv", [good_line()] * 6 + ["junk"] + [good_line()] * 4)
    with pytest.raises(DataError, match=re.escape(f"{path}:7: too few fields")):
        list(CriteoReader([path], 4, part=2, parts=3))
    assert len(list(CriteoReader([path], 4, part=1, parts=3))) == 3
    path = write(tmp_path / "b.tsv", [good_line()])
    assert [len(batch.labels) for batch in CriteoReader([path], 4, part=1, parts=3)] == [0]


BAD_LINES = [
    ("\t".join(good_line().split("\t")[:39]), "too few fields: expected 40, found 39"),
    ("", "too few fields: expected 40, found 1"),
    (good_line() + "\t", "too many fields: expected 40, found 41"),
    (with_field(1, "2"), "field 1 (label) must be 0 or 1, got '2'"),
    (with_field(1, ""), "field 1 (label) must be 0 or 1, got ''"),
    (with_field(1, "01"), "field 1 (label) must be 0 or 1, got '01'"),
    (with_field(2, "1.5"), "field 2 (integer 1) must be a decimal 64-bit integer or empty, got"),
    (with_field(14, "ten"), "field 14 (integer 13) must be a decimal 64-bit integer or empty, got"),
    (with_field(3, "-"), "field 3 (integer 2) must be"),
    (with_field(3, "--5"), "field 3 (integer 2) must be"),
    (with_field(3, " 5"), "field 3 (integer 2) must be"),
    (with_field(3, str(INT64)), "field 3 (integer 2) must be"),
    (with_field(3, str(-INT64)), "field 3 (integer 2) must be"),
    (with_field(3, f"-0{INT64}"), "field 3 (integer 2) must be"),
    (with_field(15, "0x12"), "field 15 (category 1) must be a string of at most 16 hexadecimal"),
    (with_field(40, "1234567g"), "field 40 (category 26) must be a string of at most 16"),
    (with_field(40, "1234567\x16"), "field 40 (category 26) must be a string of at most 16"),
    (with_field(40, "0" * 17), "field 40 (category 26) must be a string of at most 16"),
    (with_field(40, "00000000\r"), "field 40 (category 26) must be a string of at most 16"),
    ("\x00\xff\xfe\x80 \t junk", "too few fields: expected 40, found 2"),
    (with_field(20, "\x00\xff"), r"field 20 (category 6) must be a string of at most 16"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES)
def test_bad_line_is_an_error_with_its_place(tmp_path, bad, reason):
    path = write(tmp_path / "a.tsv", [good_line(), good_line("0"), bad, good_line()])
    good = write(tmp_path / "good.tsv", [good_line()])
    with pytest.raises(DataError, match="^" + re.escape(f"{path}:3: {reason}")) as caught:
        list(CriteoReader([good, path], 2))
    assert "--on-bad-line skip" in str(caught.value)


def test_bad_lines_are_skipped_and_counted(tmp_path):
    lines = [good_line("1")]
    for bad, _ in BAD_LINES:
        lines += [bad, good_line("0")]
    reader = CriteoReader([write(tmp_path / "a.tsv", lines)], 4, on_bad_line="skip")
    labels, _, _ = read(reader)
    assert labels.tolist() == [1.0] + [0.0] * len(BAD_LINES)
    assert reader.position.skipped == len(BAD_LINES)


@settings(max_examples=100)
@given(junk=st.binary(max_size=300))
def test_binary_junk_is_never_read(junk):
    for line in junk.split(b"\n"):
        assert check_line(line + b"\n") is not None
        assert parse_lines([good_line().encode() + b"\n", line + b"\n"]) is None


@pytest.mark.long
@settings(max_examples=200)
@given(
    row=rows,
    number=st.integers(0, 39),
    field=st.text("0123456789abcdefABCDEFxX+-. \t\r\x00\xe9", max_size=20),
)
def test_lines_are_parsed_if_and_only_if_they_are_good(row, number, field):
    """Other spellings of numbers, which pyarrow would take, are refused."""
    row[number] = field
    line = ("\t".join(row) + "\n").encode("latin-1")
    assert (check_line(line) is None) == (parse_lines([line]) is not None)


def test_line_that_is_too_long_is_one_bad_line(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 1 << 12)
    path = tmp_path / "a.tsv"
    path.write_bytes(good_line().encode() + b"\n" + bytes(50_000) + b"\n" + good_line().encode())
    with pytest.raises(DataError, match=re.escape(f"{path}:2: no newline within 4096 bytes")):
        list(CriteoReader([path], 4))
    reader = CriteoReader([path], 1, on_bad_line="skip")
    batches = iter(reader)
    next(batches)
    assert [len(rest.labels) for rest in batches] == [1]
    assert reader.position.skipped == 1
    assert reader.position.line == 3
    assert reader.position.offset == path.stat().st_size


def test_empty_file(tmp_path):
    empty = tmp_path / "empty.tsv"
    empty.touch()
    good = write(tmp_path / "good.tsv", [good_line()])
    with pytest.raises(DataError, match=re.escape(f"{empty}: the file is empty")):
        list(CriteoReader([good, empty], 4))
    reader = CriteoReader([empty, good], 4, on_bad_line="skip")
    assert len(read(reader)[0]) == 1
    assert reader.position.skipped == 1


@pytest.mark.parametrize("on_bad_line", ["error", "skip"])
def test_missing_path(tmp_path, on_bad_line):
    gone = tmp_path / "gone.tsv"
    with pytest.raises(FileNotFoundError, match=re.escape(f"{gone} does not exist")):
        CriteoReader([gone], 4, on_bad_line=on_bad_line)
    with pytest.raises(FileNotFoundError, match="is a folder"):
        count_lines([tmp_path])
    with pytest.raises(ValueError, match="no data files"):
        CriteoReader([], 4)


@pytest.mark.parametrize("on_bad_line", ["error", "skip"])
def test_damaged_gzip(tmp_path, on_bad_line):
    whole = gzip.compress("".join(good_line() + "\n" for _ in range(5000)).encode(), mtime=0)
    cut = tmp_path / "cut.tsv.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    text = tmp_path / "text.tsv.gz"
    text.write_text(good_line() + "\n")
    for path in (cut, text):
        with pytest.raises(DataError, match=re.escape(f"{path}: cannot be decompressed")):
            list(CriteoReader([path], 4, on_bad_line=on_bad_line))
        with pytest.raises(DataError, match=re.escape(f"{path}: cannot be decompressed")):
            count_lines([path])
