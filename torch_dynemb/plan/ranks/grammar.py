"""Options of the model of ranks as texts: counts of ranks, rates of links, times."""

from __future__ import annotations

import argparse
import re

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(b|B)(?:/s|ps)?")
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def rank_counts(text: str) -> list[int]:
    """Parse counts of ranks such as ``"8"`` or ``"8,64,1024"``; return them in ascending order.

    Raises:
        argparse.ArgumentTypeError: one is not a number of at least 1, or is given twice.

    Example:
        >>> rank_counts("64,8")
        [8, 64]
    """
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not entry.isdecimal() or int(entry) < 1:
            raise argparse.ArgumentTypeError(
                f"{entry!r} is not a number of at least 1: write 8, or a list such as 8,64,1024"
            )
    counts = sorted(map(int, entries))
    if len(set(counts)) < len(counts):
        raise argparse.ArgumentTypeError(f"{text!r} repeats a number: give every number once")
    return counts


def parse_rate(option: str, text: str) -> float:
    """Parse the rate of a link; return bytes a second.

    Args:
        option: beginning of an error's message.
        text: a number with the unit b (bits) or B (bytes), such as ``"400Gb"`` or ``"50 GB/s"``.

    Raises:
        ValueError: it is something else, or 0.

    Example:
        >>> parse_rate("--link", "400Gb")
        50000000000.0
    """
    found = _RATE.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise ValueError(
            f"{option} is {text!r}, expected bits or bytes a second above 0, such as 400Gb or 50GB"
        )
    return float(found[1]) * _PREFIXES[found[2]] / (8 if found[3] == "b" else 1)


def parse_time(option: str, text: str) -> float:
    """Parse a time such as ``"2us"``; return seconds.

    Args:
        option: beginning of an error's message.
        text: a number with the unit ns, us, ms or s.

    Raises:
        ValueError: it is something else.

    Example:
        >>> parse_time("--latency", "1.5ms")
        0.0015
    """
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{option} is {text!r}, expected a time such as 2us or 0.1ms")
    return float(found[1]) * _SECONDS[found[2]]


__all__ = ["parse_rate", "parse_time", "rank_counts"]
