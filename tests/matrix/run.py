"""Run cases of a space: ``run.py SPACE 'axis=value ...'``, or ``run.py SPACE --strength 3``."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SPACES = (  # each in <name>_space
    *("torchrec", "pipelines", "modules", "recis", "oneembedding", "loops"),
    *("saving", "sharded_saving", "life", "serving"),
)


def main() -> int:
    """Return 1 if a case fails."""
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    from covering import Space, failures
    from ranks import Ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("space", choices=SPACES)
    parser.add_argument("cases", nargs="*", help="values that are not plain: 'axis=value ...'")
    parser.add_argument("--strength", type=int, help="run a covering array of it")
    parser.add_argument("--seed", type=int, default=0, help="of the array, and of what is drawn")
    arguments = parser.parse_args()
    space: Space = importlib.import_module(f"{arguments.space}_space").SPACE
    started: dict[int, Ranks] = {}

    def ranks_of(number: int) -> Ranks:
        if number not in started:
            started[number] = Ranks(number, local_size=2 if number == 4 else None)
        return started[number]

    cases = [space.parsed(text) for text in arguments.cases]
    if arguments.strength:
        cases += space.cases(arguments.strength, arguments.seed)
    try:
        failed = failures(space, cases, ranks_of)
    finally:
        for ranks in started.values():
            ranks.stop()
    print("\n\n".join([*failed, f"{len(cases)} cases, {len(failed)} ways to fail"]))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
