"""Parse Criteo lines from bytes to arrays, a block of lines at a time.

A line has 40 tab-separated fields: a label (0 or 1), 13 integers, 26 categories as hexadecimal
strings of at most 16 digits. An empty integer or category is a missing value.

The fast path never loops over lines in Python: fields are located with one scan for separators,
the eight bytes that end a field are gathered as one 64-bit word, and digits are combined inside
words. Whatever it cannot prove well-formed goes through :func:`check_line`, which is slow, handles
one line and knows the exact reason.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

INTEGER_COUNT = 13
CATEGORY_COUNT = 26
FIELD_COUNT = 1 + INTEGER_COUNT + CATEGORY_COUNT

MISSING_INTEGER = int(np.iinfo(np.int64).min)
"""What a missing integer reads as; no field may spell it out."""

MISSING_ID = int.from_bytes(b"MISSING!", "big")
"""The id of a missing category, 0x4d495353494e4721.

It lies above 2**32, so no category of up to eight digits has it.
"""

_PAD = 16  # bytes that may be read in front of the first field
_FIRST_CATEGORY = 1 + INTEGER_COUNT
_MAX_HEX_DIGITS = 16

_INVALID_DIGIT = 0xFF
_HEX_TABLE = bytes(
    int(chr(c), 16) if chr(c) in "0123456789abcdefABCDEF" else _INVALID_DIGIT for c in range(256)
)

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]


class LineError(NamedTuple):
    """A line that is not in the format."""

    line: int  # index within the block
    reason: str


class ParsedBlock(NamedTuple):
    """Columns of the well-formed lines of a block, in the order of the lines."""

    labels: npt.NDArray[np.float32]  # (N,)
    integers: Int64Array  # (N, 13), MISSING_INTEGER where empty
    ids: Int64Array  # (26, N), MISSING_ID where empty
    lines: Int64Array  # (N,) index of the line within the block
    ends: Int64Array  # (N,) offset within the block just past the line
    line_count: int  # well-formed or not
    errors: list[LineError]


def check_line(line: bytes) -> str | None:
    """Say what is wrong with one line.

    Args:
        line: The line without its newline.

    Returns:
        The reason why the line is not in the format, or None if it is.
    """
    fields = line.split(b"\t")
    if len(fields) != FIELD_COUNT:
        few_or_many = "few" if len(fields) < FIELD_COUNT else "many"
        return f"too {few_or_many} fields: expected {FIELD_COUNT}, found {len(fields)}"
    if fields[0] not in (b"0", b"1"):
        return f"field 1 (label) must be 0 or 1, got {_quote(fields[0])}"
    for number, field in enumerate(fields[1:_FIRST_CATEGORY], start=1):
        if field and _parse_integer(field) is None:
            return (
                f"field {number + 1} (integer {number}) must be a decimal 64-bit integer or "
                f"empty, got {_quote(field)}"
            )
    for number, field in enumerate(fields[_FIRST_CATEGORY:], start=1):
        if len(field) > _MAX_HEX_DIGITS or _INVALID_DIGIT in field.translate(_HEX_TABLE):
            return (
                f"field {number + _FIRST_CATEGORY} (category {number}) must be a string of at most "
                f"{_MAX_HEX_DIGITS} hexadecimal digits or empty, got {_quote(field)}"
            )
    return None


def parse_block(data: bytes) -> ParsedBlock:
    """Parse complete lines.

    Args:
        data: Whole lines, each ended by a newline.

    Returns:
        The columns of the well-formed lines, and the reasons for the others.

    Raises:
        ValueError: ``data`` does not end with a newline.
    """
    if not data.endswith(b"\n"):
        raise ValueError(
            f"data must end with a newline, got {_quote(data[-20:])} at its end; "
            "pass complete lines only"
        )
    padded = bytes(_PAD) + data
    text = np.frombuffer(padded, dtype=np.uint8)
    separators = np.flatnonzero((text - np.uint8(9)) <= 1)  # tab is 9, newline is 10
    is_newline = text[separators] == 10
    newlines = np.flatnonzero(is_newline)
    line_count = len(newlines)
    line_ends = separators[newlines] + 1
    field_counts = np.diff(newlines, prepend=-1)

    has_all_fields = field_counts == FIELD_COUNT
    suspects = set(np.flatnonzero(~has_all_fields).tolist())
    candidates = np.flatnonzero(has_all_fields)
    # Row i of `ends` holds the position of the separator behind each field of candidate i.
    if suspects:
        first = newlines[candidates] - (FIELD_COUNT - 1)
        ends = separators[first[:, None] + np.arange(FIELD_COUNT)]
    else:
        ends = separators.reshape(-1, FIELD_COUNT)
    starts = np.empty_like(ends)
    starts[:, 1:] = ends[:, :-1] + 1
    previous_line_ends = np.concatenate([[_PAD], line_ends[:-1]])
    starts[:, 0] = previous_line_ends[candidates]

    labels = text[starts[:, 0]] - np.uint8(ord("0"))
    good = (ends[:, 0] - starts[:, 0] == 1) & (labels <= 1)

    span = slice(1, _FIRST_CATEGORY)
    integers, proven = _parse_integers(padded, text, starts[:, span], ends[:, span])
    for row, column in np.argwhere(~proven).tolist():
        field = padded[starts[row, 1 + column] : ends[row, 1 + column]]
        value = _parse_integer(field)
        if value is None:
            good[row] = False
        else:
            integers[row, column] = value

    ids, hexadecimal = _parse_categories(
        padded, starts[:, _FIRST_CATEGORY:], ends[:, _FIRST_CATEGORY:]
    )
    good &= hexadecimal

    suspects.update(candidates[~good].tolist())
    errors = []
    for line in sorted(suspects):
        reason = check_line(padded[previous_line_ends[line] : line_ends[line] - 1])
        if reason is None:
            raise AssertionError(f"the fast path refused line {line} of a block, which is valid")
        errors.append(LineError(line, reason))
    if not good.all():
        labels, integers, ids = labels[good], integers[good], ids[good]
        candidates = candidates[good]
    return ParsedBlock(
        labels=labels.astype(np.float32),
        integers=integers,
        ids=np.ascontiguousarray(ids.T),
        lines=candidates,
        ends=line_ends[candidates] - _PAD,
        line_count=line_count,
        errors=errors,
    )


def _quote(field: bytes) -> str:
    shown = field if len(field) <= 40 else field[:40] + b"..."
    return ascii(shown.decode("ascii", errors="backslashreplace"))


def _parse_integer(field: bytes) -> int | None:
    digits = field.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 19:
        return None
    value = int(field)
    # MISSING_INTEGER, the lowest int64, is taken.
    return value if abs(value) <= -(MISSING_INTEGER + 1) else None


def _words_before(data: bytes, ends: Int64Array) -> UInt64Array:
    """Gather the 8 bytes before each position, the last of them in the highest byte."""
    everywhere = np.lib.stride_tricks.as_strided(
        np.frombuffer(data, dtype=np.uint8)[:8].view("<u8"), shape=(len(data) - 7,), strides=(1,)
    )
    words: UInt64Array = everywhere[ends - 8]
    return words


def _keep_last(words: UInt64Array, counts: Int64Array, fill: int) -> UInt64Array:
    """Replace all but the last ``counts`` (0 to 8) bytes of each word by the byte ``fill``."""
    masks = np.array([(1 << (8 * (8 - n))) - 1 for n in range(9)], dtype=np.uint64)  # to replace
    mask = masks[counts]
    filled: UInt64Array = (words & ~mask) | (mask & np.uint64(fill * 0x0101010101010101))
    return filled


def _parse_integers(
    data: bytes, text: npt.NDArray[np.uint8], starts: Int64Array, ends: Int64Array
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Parse decimal fields of up to eight digits; flag what is certainly right."""
    negative = text[starts] == ord("-")
    lengths = ends - starts - negative
    words = _keep_last(_words_before(data, ends), np.minimum(lengths, 8), ord("0"))
    # A byte c is a digit if both c and c + 6 have 3 in their high half.
    high_halves, threes = np.uint64(0xF0F0F0F0F0F0F0F0), np.uint64(0x3030303030303030)
    digits_only: npt.NDArray[np.bool_] = (words & high_halves) == threes
    digits_only &= ((words + np.uint64(0x0606060606060606)) & high_halves) == threes
    # Pairs of digits, then of pairs, then of those: the first digit is in the lowest byte.
    values = words & np.uint64(0x0F0F0F0F0F0F0F0F)
    values = (values * np.uint64(10 * 2**8 + 1) >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    values = (values * np.uint64(100 * 2**16 + 1) >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    values = values * np.uint64(10000 * 2**32 + 1) >> np.uint64(32)
    integers = values.view(np.int64)
    np.negative(integers, out=integers, where=negative)
    missing = starts == ends
    integers[missing] = MISSING_INTEGER
    digits_only &= (lengths >= 1) & (lengths <= 8)
    digits_only |= missing
    return integers, digits_only


def _parse_categories(
    data: bytes, starts: Int64Array, ends: Int64Array
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Parse hexadecimal fields to (N, 26) ids; say which rows hold nothing but such fields."""
    nibbles = data.translate(_HEX_TABLE)
    lengths = ends - starts
    longest = int(lengths.max(initial=0))
    values, valid = _parse_hex_words(_words_before(nibbles, ends), np.minimum(lengths, 8))
    if longest > 8:
        counts = np.clip(lengths - 8, 0, 8)
        high, high_valid = _parse_hex_words(_words_before(nibbles, ends - 8), counts)
        values |= high << np.uint64(32)
        valid &= high_valid & (lengths <= _MAX_HEX_DIGITS)
    ids = values.view(np.int64)
    ids[lengths == 0] = MISSING_ID
    return ids, valid.all(axis=1)


def _parse_hex_words(
    words: UInt64Array, counts: Int64Array
) -> tuple[UInt64Array, npt.NDArray[np.bool_]]:
    """Combine the last ``counts`` bytes of each word, each a hexadecimal digit's value."""
    words = _keep_last(words, counts, 0)
    valid = (words & np.uint64(0x8080808080808080)) == 0
    # The first digit is in the lowest byte: bytes to pairs, pairs to fours, fours to eight digits.
    low = np.uint64(0x00FF00FF00FF00FF)
    words = ((words & low) << np.uint64(4)) | ((words >> np.uint64(8)) & low)
    low = np.uint64(0x0000FFFF0000FFFF)
    words = ((words & low) << np.uint64(8)) | ((words >> np.uint64(16)) & low)
    low = np.uint64(0x00000000FFFFFFFF)
    return ((words & low) << np.uint64(16)) | (words >> np.uint64(32)), valid
