"""Command line of the package; ``python -m torch_dynemb --help`` lists the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch_dynemb.checkpoint.tools.commands import run
from torch_dynemb.doctor.command import add_command as add_doctor
from torch_dynemb.plan.command import add_command as add_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit status."""
    return run(arguments, more=(add_plan, add_doctor))


if __name__ == "__main__":
    sys.exit(main())
