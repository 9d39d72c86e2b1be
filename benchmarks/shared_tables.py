"""Server processes that share the tables of a package: memory, start and calls.

Three processes serve a package, with tables of their own and with ``shared_memory=``. Measured are
the time from ``load`` to the first answer of the second one, and the memory of all. That is the sum
of ``Pss``, torch's own included, after each has read all rows. Then calls of one process while the
others wait, in turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import torch
from common.command import is_selected, parser, positive
from common.report import Report, Row, compare, quantity
from common.timing import Timing, interleave_rounds
from torch import Tensor, nn
from torch.export import Dim

import torch_dynemb as td

BENCH = "shared_tables"
DIM, PROCESSES = 64, 3
OWN = "tables of its own"
SIZES = ((256, 20), (1, 1))
MEMORY = f"memory of {PROCESSES} processes"
FIRST = "second process, load to the first answer"
CASES = 2 + 1 + len(SIZES)
SHARED = Path("/dev/shm")


class Server:
    """A process that serves a package.

    Args:
        package: its path.
        directory: where tables are shared; None: they are its own.
    """

    def __init__(self, package: Path, directory: Path | None) -> None:
        program = Path(__file__).parent / "served" / "shared_process.py"
        command = [sys.executable, str(program), str(package), str(directory or "-")]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.first_ms = self._ask("first")["first_ms"]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe(self._process.stdin).close()
        self._process.wait()

    def calls(self, bags: int, length: int, count: int) -> float:
        """Return the median of calls in milliseconds."""
        return self._ask(f"calls {bags} {length} {count}")["p50_ms"]

    def touch(self) -> None:
        """Look all rows up, so that their pages are counted."""
        self._ask("touch")

    @property
    def memory(self) -> int:
        """Bytes of the process, its part of shared pages."""
        text = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text()
        (line,) = (line for line in text.splitlines() if line.startswith("Pss:"))
        return 1024 * int(line.split()[1])

    def _ask(self, line: str) -> dict[str, float]:
        given = self._pipe(self._process.stdin)
        print(line, file=given, flush=True)
        answer = self._pipe(self._process.stdout).readline()
        return json.loads(answer)  # type: ignore[no-any-return]

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


class Bags(nn.Module):
    """A model of one table."""

    def __init__(self, ids: int) -> None:
        super().__init__()
        self.bag = td.DynamicEmbeddingBag(DIM, mode="sum", name="rows", optimizer=td.SGD(lr=0.1))
        self.bag.group.insert_or_assign("rows", torch.arange(ids), torch.randn(ids, DIM))

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return the sums of bags."""
        pooled: Tensor = self.bag(ids, offsets)
        return pooled


def exported(folder: Path, ids: int) -> Path:
    """Write the package."""
    given = (torch.arange(8), torch.arange(0, 8, 2))
    shapes = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    return td.serving.export(Bags(ids), folder / "package", given, dynamic_shapes=shapes)


def measured(package: Path, rounds: int, calls: int, only: list[str]) -> Iterator[Row]:
    """Yield the rows of all cases."""
    with ExitStack() as stack, tempfile.TemporaryDirectory(dir=SHARED) as directory:
        of: dict[str, list[Server]] = {}
        for name, place in (("ours", Path(directory)), (OWN, None)):
            # the shared ones first end before the directory
            of[name] = [stack.enter_context(Server(package, place)) for _ in range(PROCESSES)]
        if is_selected(only, MEMORY, OWN):
            for name, servers in of.items():
                for server in servers:
                    server.touch()
                memory = sum(server.memory for server in servers) / (1 << 20)
                what = "shared" if name == "ours" else "each its own"
                yield quantity(BENCH, f"{MEMORY}, {what}", memory, "MiB")
        if is_selected(only, FIRST, OWN):
            second = [Timing((of[name][1].first_ms,)) for name in ("ours", OWN)]
            yield compare(BENCH, FIRST, second[0], OWN, second[1])
        for bags, length in SIZES:
            case = f"{bags} bags of {length}, p50"
            if not is_selected(only, case, OWN):
                continue
            candidates = {
                name: lambda number, server=servers[0], bags=bags, length=length: server.calls(
                    bags, length, calls
                )
                for name, servers in of.items()
            }
            times = interleave_rounds(candidates, rounds=rounds, warmup=1)
            yield compare(BENCH, case, times["ours"], OWN, times[OWN])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="of the table (default 2,000,000)")
    arguments.add_argument("--calls", type=positive, help="of a round (default 500)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    report = Report(as_json=options.json, cases=CASES)
    ids = options.ids or (2000 if options.quick else 2_000_000)
    calls = options.calls or (20 if options.quick else 500)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        package = exported(Path(folder), ids)
        report.take(measured(package, options.rounds, calls, options.only))
    report.close()


if __name__ == "__main__":
    main()
