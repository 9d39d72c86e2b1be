"""Printed report of the model of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch_dynemb.console.lines import in_bytes
from torch_dynemb.plan.report_parts import Part, count


def rank_parts(model: Mapping[str, Any]) -> Iterator[Part]:
    """Iterate over the parts of a report.

    Args:
        model: result of :func:`torch_dynemb.plan.ranks.outcome.modelled`.
    """
    for ranks in model["ranks"]:
        yield _cases(model, ranks)
    yield _paying(model)


def name_of(case: Mapping[str, Any]) -> str:
    """Return the name of a sharding type, and whether ids are sent once."""
    return f"{case['sharding']}{', dedup' if case['dedup'] else ''}"


def _cases(model: Mapping[str, Any], ranks: int) -> Part:
    heads = ["sharding", "ids", "lengths", "rows", "gradients", "between nodes"]
    heads += ["most sent", "most received", "lookups", "of rows", "memory", "most memory"]
    heads += ["steps a second" if model["per_second"] else "step", "links", "lines a second"]
    rows = [heads]
    for case in model["cases"]:
        if case["ranks"] != ranks:
            continue
        sent, fullest, seconds = case["sent"], case["fullest"], case["seconds"]
        per_step = seconds["step"]
        rows.append(
            [
                name_of(case),
                *(in_bytes(sent[kind]) for kind in ("ids", "lengths", "rows", "gradients")),
                in_bytes(sent["between_nodes"]),
                in_bytes(sent["busiest_rank"]),
                in_bytes(case["received"]["busiest_rank"]),
                f"{fullest['lookups']:.2f}x",
                f"{fullest['rows']:.2f}x",
                *(in_bytes(case["memory"][kind]) for kind in ("mean", "fullest")),
                f"{1 / per_step:.3g}" if model["per_second"] else f"{1e3 * per_step:.3g} ms",
                f"{100 * seconds['links'] / per_step:.0f} %",
                count(model["batch"] / per_step),
            ]
        )
    return Part(f"Step of {count(model['batch'])} lines on {count(ranks)} ranks", rows, [])


def _paying(model: Mapping[str, Any]) -> Part:
    rows = [["sharding", "pays up to", "because with more"]]
    for pays in model["pays_up_to"]:
        rows.append([name_of(pays), f"{count(pays['ranks'])} ranks", pays["reason"] or "-"])
    row, links = model["row"], model["link_bytes_per_second"]
    notes = [
        "Bytes are those that a rank sends in a step, and on average receives. Lookups and rows "
        "are those of the fullest rank, by their mean.",
        f"Tables have {row['dim']} columns of {row['dtype']} and {row['optimizer']}, with room "
        "for the upper end of the interval; outputs are float32.",
        f"Links: {8e-9 * links:.4g} Gb/s a rank between nodes, "
        f"{8e-9 * model['node_link_bytes_per_second']:.4g} Gb/s in nodes of "
        f"{model['ranks_per_node']}, {1e6 * model['latency_seconds']:.3g} us a message. The dense "
        "part of a model is not included.",
        f"Own work of a rank: costs of {model['costs']['source']}.",
    ]
    if model["extrapolates_lines"]:
        notes.append(
            "The sample has fewer lines than a step, so that distinct ids, of dedup and of updated "
            "rows, are extrapolated: give more lines."
        )
    return Part("Which number of ranks stops paying", rows, notes)


__all__ = ["name_of", "rank_parts"]
