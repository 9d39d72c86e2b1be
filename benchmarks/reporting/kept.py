"""Kept results: the newest row of each case, and the file that it comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.report import Row

Key = tuple[str, str, str]  # bench, case, peer


class MissingRowError(LookupError):
    """A table or plot asks for a row that no file of results has."""


@dataclass(frozen=True)
class Source:
    """A file of results.

    Attributes:
        name: of the file.
        machine: facts of the machine, as :func:`common.machine.description` gives them.
    """

    name: str
    machine: dict[str, Any]

    @property
    def date(self) -> str:
        """Day of the measurement, such as 2026-11-21."""
        return str(self.machine["date"])[:10]

    @property
    def processor(self) -> str:
        """Short name of the GPU, or of the processor with its vector instructions."""
        if self.machine.get("device", "cpu") != "cpu":
            return str(self.machine["device"])
        name = re.sub(r"\(R\)|Processor", "", str(self.machine["processor"]))
        return f"{' '.join(name.split())}, {self.machine['cpu_capability']}"

    @property
    def note(self) -> str:
        """Restriction of the result, from ``run.py --note``; empty: there is none."""
        return str(self.machine.get("note", ""))


@dataclass(frozen=True)
class KeptRow:
    """A row and its source."""

    row: Row
    source: Source

    @property
    def missed(self) -> bool:
        """True for a row that counts and does not meet its target."""
        return bool(self.row["valid"]) and self.row.get("met") is False

    @property
    def target(self) -> float | None:
        """Largest ratio, or largest quantity, that meets the target."""
        return self.row.get("target", self.row.get("target_value"))


class Kept:
    """All rows of a folder of results; of two rows of one case, the newer one counts.

    Args:
        folder: with JSON files that ``run.py --save`` has written. Others are skipped.
    """

    def __init__(self, folder: Path) -> None:
        self._rows: dict[Key, KeptRow] = {}
        files = ((path, json.loads(path.read_text())) for path in folder.glob("*.json"))
        results = [(path, content) for path, content in files if "machine" in content]
        for path, content in sorted(results, key=lambda of: of[1]["machine"]["date"]):
            source = Source(path.name, content["machine"])
            for row in content["rows"]:
                self._rows[key_of(row)] = KeptRow(row, source)

    def __iter__(self) -> Iterator[KeptRow]:
        return iter(self._rows.values())

    def get(self, bench: str, case: str, peer: str = "") -> KeptRow:
        """Look up a row.

        Args:
            bench: name of the benchmark.
            case: as the row has it.
            peer: likewise; empty for a row without one.

        Returns:
            The newest row of this case.

        Raises:
            MissingRowError: no file has one.
        """
        try:
            return self._rows[bench, case, peer]
        except KeyError:
            close = sorted(key[1:] for key in self._rows if key[0] == bench)
            raise MissingRowError(
                f"no row of {bench}, {case!r}, peer={peer!r} in results/: expected one of {close}"
            ) from None


def key_of(row: Row) -> Key:
    """Return bench, case and peer of a row."""
    return row["bench"], row["case"], row["peer"] or ""


def sources_of(rows: Iterable[KeptRow]) -> list[Source]:
    """List the files that rows come from, each once, the oldest first."""
    by_name = {kept.source.name: kept.source for kept in rows}
    return sorted(by_name.values(), key=lambda of: (of.machine["date"], of.name))
