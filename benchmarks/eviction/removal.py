"""Removal of half of a table's ids by rule: the longest slice against one call for all."""

from __future__ import annotations

from collections.abc import Iterator
from time import process_time

import torch
from common.command import is_selected
from common.id_streams import distinct_ids
from common.report import Row, quantity

import torch_dynemb as td

SLICES = (1 << 14, 1 << 16, 1 << 18)  # ids
STEPS = 16


def _filled(ids: int) -> td.TableGroup:
    """Return a table with ids, as many of each step."""
    tables = [td.TableConfig("bench", 16, policy=td.Policy(score="step"))]
    group = td.TableGroup(tables, optimizer=td.SGD(lr=0.1), seed=0)
    group.reserve(0, ids)
    for batch in distinct_ids(0, ids).split(-(-ids // STEPS)):
        group.insert(0, batch)
        group.step()
    return group


def removal_rows(bench: str, ids: int, only: list[str]) -> Iterator[Row | str]:
    """Yield the longest slice in CPU time of one thread, so that other programs do not count."""
    cases = {size: f"longest slice of a removal from {ids} ids, {size} a slice" for size in SLICES}
    cases = {size: case for size, case in cases.items() if is_selected(only, case, "target")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for size, case in cases.items():
        yield case
        group, begin = _filled(ids), process_time()
        group.remove(0, not_seen_for=STEPS // 2)
        one_call = process_time() - begin
        removal = _filled(ids).remove_in_slices(0, not_seen_for=STEPS // 2, batch_size=size)
        slices, begin = [], process_time()
        for _ in removal:
            slices.append(process_time() - begin)
            begin = process_time()
        yield quantity(
            bench,
            case,
            1e3 * max(slices),
            "ms",
            slices=len(slices),
            all_slices_ms=1e3 * sum(slices),
            one_call_ms=1e3 * one_call,
        )
    torch.set_num_threads(threads)
