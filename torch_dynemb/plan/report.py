"""Printed report of a plan: tables of rich in a terminal if it is installed, else plain text."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_dynemb.console.lines import aligned, in_bytes
from torch_dynemb.plan.choices import EVICT, FILES
from torch_dynemb.plan.ranks.report import rank_parts
from torch_dynemb.plan.replay.report import replay_parts
from torch_dynemb.plan.report_parts import Part, count, percent, share


def print_report(plan: Mapping[str, Any]) -> None:
    """Print a plan.

    Args:
        plan: result of :func:`torch_dynemb.plan.outcome.outcome`.
    """
    if sys.stdout.isatty():
        try:
            _print_rich(list(parts(plan)))
        except ImportError:
            pass
        else:
            return
    print(plain_text(list(parts(plan))))


def plain_text(report: Sequence[Part]) -> str:
    """Format a report as text without colours and frames."""
    texts = []
    for part in report:
        table = aligned(part.rows) if part.rows else []
        texts.append("\n".join([part.title, *table, *part.notes]))
    return "\n\n".join(texts)


def _print_rich(report: Sequence[Part]) -> None:
    console = importlib.import_module("rich.console").Console(highlight=False)
    table_class = importlib.import_module("rich.table").Table
    text = importlib.import_module("rich.text").Text
    for part in report:
        if part.rows:
            table = table_class(title=part.title, title_justify="left", title_style="bold")
            for number, head in enumerate(part.rows[0]):
                table.add_column(text(head), justify="left" if number == 0 else "right")
            for row in part.rows[1:]:
                table.add_row(*(text(cell) for cell in row))
            console.print(table)
        else:
            console.print(text(part.title, style="bold"))
        for note in part.notes:
            console.print(text(note))
        console.print()


def parts(plan: Mapping[str, Any]) -> Iterator[Part]:
    """Iterate over the parts of a report, in their order."""
    yield _sample(plan)
    yield _columns(plan)
    yield _growth(plan)
    yield _coverage(plan)
    yield _choices(plan)
    yield _suggestion(plan)
    if plan["replay"] is not None:
        yield from replay_parts(plan["replay"])
    if plan["scale"] is not None:
        yield from rank_parts(plan["scale"])


def _sample(plan: Mapping[str, Any]) -> Part:
    notes = [f"{count(plan['lines'])} lines with {count(plan['lookups'])} ids"]
    if plan["missing"]:
        some = "1 field is" if plan["missing"] == 1 else f"{count(plan['missing'])} fields are"
        notes[0] += f"; {some} empty"
    sampled = [name for name, column in plan["columns"].items() if column["sampled"]]
    if sampled:
        notes.append(
            f"Figures of {', '.join(sampled)} are estimates from a sample of the ids by hash, "
            "because there are more than --keep says; the most frequent ids are counted exactly."
        )
    return Part(f"Sample: {', '.join(plan['sources'])}", [], notes)


def _columns(plan: Mapping[str, Any]) -> Part:
    heads = ["column", "ids", "distinct", "seen once", "99 % of ids are"]
    heads += [f"distinct in {count(plan['total_lines'])} lines", "from", "to"]
    rows = [heads]
    for name, column in plan["columns"].items():
        total = column["total"]
        rows.append(
            [
                name,
                count(column["lookups"]),
                count(column["distinct"]),
                share(column["seen_once"], column["distinct"]),
                count(column["ids_for_99_percent"]),
                *(count(total[end]) for end in ("expected", "low", "high")),
            ]
        )
    if len(plan["columns"]) > 1:
        rows.append(
            [
                "all",
                count(plan["lookups"]),
                count(plan["distinct"]),
                share(plan["seen_once"], plan["distinct"]),
                count(next(x["ids"] for x in plan["coverage"] if x["share"] == 0.99)),
                *(count(plan["total"][end]) for end in ("expected", "low", "high")),
            ]
        )
    note = (
        f"About {percent(plan['known_lookups'])} of the ids in the next lines are among those of "
        "the sample, if they are drawn as those were."
    )
    return Part("Columns", rows, [note])


def _growth(plan: Mapping[str, Any]) -> Part:
    rows = [["lines", "distinct ids", "from", "to"]]
    rows += [
        [count(at["lines"]), *(count(at[end]) for end in ("expected", "low", "high"))]
        for at in plan["growth"]
    ]
    return Part("Growth, all columns", rows, [])


def _coverage(plan: Mapping[str, Any]) -> Part:
    rows = [["of all lookups", "go to so many ids", "of the distinct ones"]]
    rows += [
        [percent(at["share"]), count(at["ids"]), share(at["ids"], plan["distinct"])]
        for at in plan["coverage"]
    ]
    return Part("Most frequent ids", rows, [])


def _choices(plan: Mapping[str, Any]) -> Part:
    several = plan["ranks"] > 1
    heads = ["rows for", "dtype", "state", "rows", "lookups that find it"]
    heads += ["bytes of rows", "of state", "of the index", "memory", "disk"]
    known = plan["device_memory"] is not None
    rows = [[*heads, "fits"] if known else heads]
    for choice in plan["choices"]:
        memory = choice["bytes_of_a_rank"]["memory"]
        disk = choice["bytes_of_a_rank"]["disk"]
        row = [
            choice["how"],
            choice["row"]["dtype"],
            choice["row"]["state_dtype"],
            count(choice["ids"]),
            percent(choice["coverage"]),
            *(in_bytes(memory[kind]) for kind in ("rows", "state", "index", "total")),
            in_bytes(disk) if disk else "-",
        ]
        rows.append([*row, "yes" if choice["fits"] else "no"] if known else row)
    notes = [
        "Rows are for the upper end of the interval; the index is as large as after a growth. "
        "Lookups that find a row in memory are a lower estimate of those after the sample."
    ]
    if several:
        notes.append(
            f"Bytes are those of one of {plan['ranks']} ranks, which share the ids of every table; "
            f"the busiest one gets {percent(plan['busiest_rank'])} of the sample's lookups "
            f"({percent(1 / plan['ranks'])} would be even)."
        )
    notes.append("Files take as much again while a snapshot is kept, and are for the CPU only.")
    row = plan["choices"][0]["row"]
    return Part(f"Choices for {row['dim']} columns and {row['optimizer']}", rows, notes)


def _suggestion(plan: Mapping[str, Any]) -> Part:
    if plan["device_memory"] is None:
        note = "Say with --device-memory what the tables may take on a rank, such as 40GB."
        return Part("Suggestion: none", [], [note])
    if plan["suggestion"] is None:
        note = (
            f"Nothing fits into {in_bytes(plan['device_memory'])} a rank: give more "
            "--device-memory or --ranks, a smaller --dim, or an optimizer with less state."
        )
        return Part("Suggestion: none", [], [note])
    choice = plan["choices"][plan["suggestion"]]
    row = choice["row"]
    notes = [f"dtype=torch.{row['dtype']}, state of {row['state_dtype']}, {choice['code']}"]
    if "capacity" in choice["code"] and len(plan["columns"]) > 1:
        rows = ", ".join(f"{name} {sizes['rows']}" for name, sizes in plan["columns"].items())
        notes.append(f"The capacity of each column's table: {rows}")
    if choice["how"] == EVICT:
        notes.append(
            f"Up to {percent(1 - choice['coverage'])} of the lookups go to ids that have no "
            "room; only training shows what that costs in quality."
        )
        for other in plan["choices"]:
            if other["how"] == FILES and other["fits"]:
                notes.append(
                    f"On the CPU, files have room for all ids: {other['code']} with "
                    f"{in_bytes(other['bytes_of_a_rank']['disk'])} of disk a rank; then at least "
                    f"{percent(other['coverage'])} of the lookups find their row in memory."
                )
    return Part(f"Suggestion: {choice['how']}", [], notes)


__all__ = ["parts", "plain_text", "print_report"]
