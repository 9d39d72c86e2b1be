"""``python -m torch_dynemb doctor``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from torch_dynemb.doctor.facts import Facts, gather
from torch_dynemb.doctor.findings import Finding, findings

_PROBLEM = 1  # exit status


def add_command(commands: Any) -> None:
    """Add the command ``doctor``.

    Args:
        commands: result of ``ArgumentParser.add_subparsers``.
    """
    parser = commands.add_parser(
        "doctor",
        help="versions, devices, memory and files of this machine, and what could be better",
        description="Classify each fact of this machine as ok, a note or a problem, with a remedy. "
        "A note works, but could be better. A problem keeps the library from working, and the exit "
        "status is 1. torch_dynemb/doctor/README.md explains each line.",
    )
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings.

    Args:
        arguments: of the command line.

    Returns:
        The exit status: 1 if there is a problem.
    """
    facts = gather()
    found = findings(facts)
    print(as_json(facts, found) if arguments.json else as_text(found))
    return _PROBLEM if any(finding.level == "problem" for finding in found) else 0


def as_text(found: Sequence[Finding]) -> str:
    """Format findings as text: a line for each, and another line for its remedy.

    Args:
        found: the findings.
    """
    width = max(len(finding.what) for finding in found)
    lines = []
    for finding in found:
        lines.append(f"{finding.level:8} {finding.what:{width}}  {finding.value}")
        if finding.remedy:
            lines.append(f"{'':8} {'':{width}}  -> {finding.remedy}")
    counts = []
    for level in ("problem", "note"):
        count = sum(finding.level == level for finding in found)
        counts.append(f"{count} {level}{'' if count == 1 else 's'}")
    return "\n".join([*lines, "", ", ".join(counts)])


def as_json(facts: Facts, found: Sequence[Finding]) -> str:
    """Return facts and findings as JSON.

    Args:
        facts: of the machine.
        found: findings for these facts.
    """
    about = {
        **dataclasses.asdict(facts),
        "built": facts.built._asdict(),
        "gpus": [gpu._asdict() for gpu in facts.gpus],
        "address_limits": [limit._asdict() for limit in facts.address_limits],
    }
    return json.dumps({"facts": about, "findings": [of._asdict() for of in found]}, indent=2)


__all__ = ["add_command", "as_json", "as_text", "run"]
