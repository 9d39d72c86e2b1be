"""A training step of one collection by the number of its tables and of its features.

Batches of 16, one id in a bag, D=8, SGD. The peer is a loop over ``nn.EmbeddingBag``, one for each
table, with ``torch.optim.SGD``: forward, backward and step. Time and memory by table or feature say
whether they grow in a straight line. Then batches of up to a million bags of one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from common.command import is_selected, parser
from common.report import Report, Row, compare, quantity
from common.resident import resident_bytes
from common.timing import elapsed_ms, interleave_rounds
from torch import nn

import torch_dynemb as td

BENCH = "many_tables"
PEER = "a loop over nn.EmbeddingBag"
DIM, BATCH, IDS = 8, 16, 1000
NUMBERS = (10, 100, 1000, 3000)
FEATURES = (10, 100, 1000, 10_000)
BATCHES = (10_000, 100_000, 1_000_000)
CASES = 2 * len(NUMBERS) + len(FEATURES) + len(BATCHES)


def dynamic(tables: int, features: int, batch: int) -> Callable[[], None]:
    """Return a step of a collection, with so many features of each table."""
    names = [[f"{t}.{f}" for f in range(features)] for t in range(tables)]
    module = td.DynamicEmbeddingBagCollection(
        [td.TableConfig(f"t{t}", DIM, feature_names=of) for t, of in enumerate(names)],
        optimizer=td.SGD(lr=0.01),
    )
    keys = [name for of in names for name in of]
    count = len(keys) * batch
    ids, offsets = torch.randint(0, IDS, (count,)), torch.arange(count + 1)

    def step() -> None:
        module.optimizer.zero_grad()
        module(td.KeyedJagged(keys, ids, offsets)).sum().backward()
        module.optimizer.step()

    return step


def static(tables: int, features: int, batch: int) -> Callable[[], None]:
    """Return the same of modules, one for each table."""
    bags = nn.ModuleList(nn.EmbeddingBag(IDS, DIM, mode="sum") for _ in range(tables))
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.01)
    ids = torch.randint(0, IDS, (tables, features, batch, 1))

    def step() -> None:
        optimizer.zero_grad()
        pooled = [bag(of) for bag, of_table in zip(bags, ids, strict=True) for of in of_table]
        torch.cat(pooled, 1).sum().backward()
        optimizer.step()

    return step


def compared(case: str, per: int, sizes: tuple[int, int, int], rounds: int) -> Row:
    """Return a row of a step, with its time by table or feature."""
    steps = {"ours": dynamic(*sizes), PEER: static(*sizes)}
    timed = {name: lambda number, step=step: elapsed_ms(step) for name, step in steps.items()}
    timings = interleave_rounds(timed, rounds=rounds, warmup=2)
    ours = timings["ours"]
    each = {"us_each": 1e3 * ours.median_ms / per}
    return compare(BENCH, case, ours, PEER, timings[PEER], **each)


def measured(rounds: int, quick: bool, only: list[str]) -> Iterator[Row]:
    """Yield the rows of all cases."""
    for tables in NUMBERS[:2] if quick else NUMBERS:
        case = f"{tables} tables"
        if is_selected(only, case, PEER):
            yield compared(f"{case}: step", tables, (tables, 1, BATCH), rounds)
            before = resident_bytes()
            step = dynamic(tables, 1, BATCH)
            step()
            each = (resident_bytes() - before) / tables / 1024
            yield quantity(BENCH, f"{case}: memory of one", each, "KiB")
    for features in FEATURES[:2] if quick else FEATURES:
        case = f"{features} features of 10 tables: step"
        if is_selected(only, case, PEER):
            yield compared(case, features, (10, features // 10, BATCH), rounds)
    for batch in BATCHES[:1] if quick else BATCHES:
        case = f"batch {batch} of a table: step"
        if is_selected(only, case, PEER):
            yield compared(case, batch, (1, 1, batch), rounds)


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    report = Report(as_json=options.json, cases=CASES)
    report.take(measured(options.rounds, options.quick, options.only))
    report.close()


if __name__ == "__main__":
    main()
