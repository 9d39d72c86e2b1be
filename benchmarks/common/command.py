"""The command line that every benchmark has."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark.

    Args:
        description: what the benchmark measures.

    Returns:
        The parser, to which a benchmark adds its own sizes.
    """
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--json", action="store_true", help="one JSON line per case, no table")
    result.add_argument("--quick", action="store_true", help="smaller sizes: a check, no result")
    result.add_argument(
        "--rounds", type=positive, default=7, help="timed rounds of each case (default 7)"
    )
    result.add_argument(
        "--only",
        metavar="TEXT",
        action="append",
        default=[],
        help="run only comparisons with TEXT in their 'case: peer'; may be repeated",
    )
    return result


def positive(text: str) -> int:
    """Return an argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} given, expected an integer of at least 1")
    return value


def is_selected(only: Sequence[str], case: str, peer: str) -> bool:
    """Return whether ``--only`` asks for a comparison."""
    return not only or any(text in f"{case}: {peer}" for text in only)
