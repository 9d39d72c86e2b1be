"""Command line of the package: ``python -m torch_dynemb inspect CHECKPOINT``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_dynemb.checkpoint import inspect as inspection


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torch_dynemb", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser(
        "inspect", help="sizes and policies of the tables in a checkpoint, histograms of scores"
    )
    inspect.add_argument("checkpoint", type=Path, help="a file that torch.save wrote")
    chosen = parser.parse_args(arguments)
    try:
        groups = inspection.load(chosen.checkpoint)
        said = [inspection.describe(group) for group in groups]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n\n".join(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
