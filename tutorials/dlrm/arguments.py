"""Kinds of values that the command line takes: what is wrong with a text, argparse says."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch_dynemb as td
from torch_dynemb.serving.row_formats import ROW_KINDS, RowKind
from tutorials.dlrm.policies import admission_rule


def at_least(least: int) -> Callable[[str], int]:
    """An integer that is not less."""

    def parse_number(text: str) -> int:
        value = int(text) if text.lstrip("-").isdigit() else None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"expected an integer from {least} on, got {text!r}")
        return value

    return parse_number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def number_from(least: float) -> Callable[[str], float]:
    """A number that is not less."""

    def parse_number(text: str) -> float:
        if not least <= (value := _number(text)) < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number from {least:g} on, got {text!r}")
        return value

    return parse_number


def positive(text: str) -> float:
    """A number above 0."""
    if not 0 < (value := _number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def not_negative(text: str) -> float:
    """0 or a number above."""
    if not 0 <= (value := _number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"expected 0 or a number above, got {text!r}")
    return value


def admission(text: str) -> str:
    """What admission_rule() reads, as it is."""
    try:
        admission_rule(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def fraction(text: str) -> float:
    """A number between 0 and 1, neither of them."""
    if not 0 < (value := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text!r}")
    return value


def cache(text: str) -> str:
    """A size of the cache of an SSDStore, as it is."""
    return _of_store("cache", text)


def disk(text: str) -> str:
    """Bytes that the files of an SSDStore may take, as they are."""
    return _of_store("disk", text)


def _of_store(option: str, text: str) -> str:
    try:
        td.SSDStore("rows", **{option: text})  # makes no files
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def row_kinds(text: str) -> tuple[RowKind, ...]:
    """Kinds of rows of frozen tables, between commas."""
    kinds = tuple(kind for name in text.split(",") for kind in ROW_KINDS if kind == name)
    if len(kinds) != len(text.split(",")) or len(set(kinds)) != len(kinds):
        raise argparse.ArgumentTypeError(
            f"expected some of {', '.join(ROW_KINDS)} between commas, each once, got {text!r}"
        )
    return kinds
