"""Bags of quantized rows against bags of float32 rows: what a lookup of a frozen table takes.

Sums of bags of 20 ids, drawn uniformly from a table that is larger than the cache. Handles are
given: the search in the index is the same for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from common.command import is_selected, parser, positive
from common.report import Report, Row, compare
from common.timing import interleave

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import GENERATION_BITS, Pooling, RowFormat

BENCH = "quantized_rows"
FLOAT32 = "float32 rows"
BAG = 20
TARGET = 1.0
FORMATS = {"int8": RowFormat.INT8, "int4": RowFormat.INT4, "fp8": RowFormat.FLOAT8}


@dataclass(frozen=True)
class Case:
    """Size of a comparison: rows of ``dim`` columns."""

    kind: str
    dim: int

    @property
    def name(self) -> str:
        """As rows and ``--only`` have it."""
        return f"bags of {BAG}, {self.kind} rows, D={self.dim}"


def lookup_row(case: Case, table_bytes: int, batch: int, rounds: int) -> Row:
    """Compare quantized rows with rows of float32."""
    rows = table_bytes // (4 * case.dim)
    group = td.TableGroup([td.TableConfig("bench", case.dim)], optimizer=td.SGD(lr=0.1))
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(rows, case.dim, generator=generator)
    generations = torch.ones(rows, dtype=torch.int32)
    plain = group.rows._replace(weights=[floats], generations=[generations])
    row_format = FORMATS[case.kind]
    packed = plain._replace(weights=[ops.quantize_rows(floats, row_format)])
    ids = torch.randint(rows, (8, BAG * batch), generator=generator)
    handles = (ids << GENERATION_BITS) | 1
    offsets = torch.arange(0, BAG * batch + 1, BAG)

    def bags(of: ops.RowTensors, formats: list[int]) -> Callable[[int], object]:
        return lambda call: ops.embedding_inference(
            of,
            ops.LookupBatch(ids[call % 8], offsets, None, [0], [case.dim], Pooling.SUM),
            handles[call % 8],
            formats=formats,
        )

    candidates = {"ours": bags(packed, [row_format]), "peer": bags(plain, [RowFormat.FLOATS])}
    timings = interleave(candidates, rounds=rounds, calls=8)
    return compare(
        BENCH,
        case.name,
        timings["ours"],
        FLOAT32,
        timings["peer"],
        target=TARGET,
        ns_an_id=timings["ours"].median_ms * 1e6 / (BAG * batch),
        float32_ns_an_id=timings["peer"].median_ms * 1e6 / (BAG * batch),
    )


def rows(cases: list[Case], table_bytes: int, batch: int, rounds: int) -> Iterator[Row | str]:
    """Yield the name of each case as it starts, then its row."""
    for case in cases:
        yield case.name
        yield lookup_row(case, table_bytes, batch, rounds)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--mib", type=positive, help="of a float32 table (default 1024)")
    options = arguments.parse_args()
    mib = options.mib or (16 if options.quick else 1024)
    batch = 64 if options.quick else 2048
    cases = [Case(kind, dim) for dim in (16, 64, 128) for kind in FORMATS]
    cases = [case for case in cases if is_selected(options.only, case.name, FLOAT32)]
    torch.set_num_threads(1)
    report = Report(as_json=options.json, cases=len(cases))
    report.take(rows(cases, mib << 20, batch, options.rounds))
    report.close()


if __name__ == "__main__":
    main()
