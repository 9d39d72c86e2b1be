"""Options of the model of ranks on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch_dynemb.plan.ranks.grammar import parse_rate, parse_time
from torch_dynemb.plan.ranks.layouts import Cluster, least_columns
from torch_dynemb.plan.ranks.links import Links
from torch_dynemb.plan.ranks.op_costs import MEASURED, OpCosts, read_costs

_NODE_SIZE = 8
_LATENCY = "2us"
_OPTIONS = (
    *("batch", "node_link", "ranks_per_node", "latency", "cores", "min_columns", "costs"),
    "steps_per_second",
)


@dataclass(frozen=True)
class RankWishes:
    """Settings of the model of ranks.

    Attributes:
        ranks: numbers of ranks to compare, ascending.
        batch: lines of a step, over all ranks.
        node_size: ranks of a node.
        links: between ranks.
        cores: of a node, which its ranks share; None: each rank has a device of its own.
        min_columns: columns of a shard at least, where columns are divided.
        costs: of the work of a rank.
        per_second: whether the report has steps a second in place of the time of a step.
    """

    ranks: list[int]
    batch: int
    node_size: int
    links: Links
    cores: int | None
    min_columns: int
    costs: OpCosts
    per_second: bool

    def cluster(self, ranks: int) -> Cluster:
        """Return so many ranks."""
        return Cluster(ranks, self.node_size)

    def is_even(self, ranks: int) -> bool:
        """Return whether so many ranks fill their nodes, and share the batch evenly."""
        return ranks % self.cluster(ranks).local == 0 and self.batch % ranks == 0


def add_rank_options(parser: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """Add the options of the model of ranks.

    Args:
        parser: of the command.
        positive: parser of a number from 1 on.
    """
    group = parser.add_argument_group(
        "ranks",
        "predict bytes, imbalance, memory and time of a step for each number of --ranks and each "
        "sharding type of TorchRec",
    )
    add = group.add_argument
    add(
        "--link",
        metavar="RATE",
        help="do it, for links between nodes of this rate a rank, such as 400Gb or 50GB; the other "
        "options of this group need it",
    )
    add("--batch", type=positive, metavar="LINES", help="lines of a step, over all ranks; required")
    add(
        "--node-link",
        metavar="RATE",
        help="rate a rank between ranks of a node (default: that of --link)",
    )
    add(
        "--ranks-per-node",
        type=positive,
        metavar="N",
        help=f"ranks of a node (default: {_NODE_SIZE})",
    )
    add(
        "--latency",
        metavar="TIME",
        help=f"time of each message, beside its bytes (default: {_LATENCY})",
    )
    add(
        "--cores",
        type=positive,
        metavar="N",
        help="cores of a node that its ranks share (default: a device for each rank)",
    )
    add(
        "--min-columns",
        type=positive,
        metavar="N",
        help="least columns of a shard, TorchRec's min_partition (default: 128, or half of --dim)",
    )
    add(
        "--costs",
        type=Path,
        metavar="FILE",
        help="JSON with the costs of a rank's own work, from benchmarks/scale_out.py (default: "
        f"{MEASURED.source})",
    )
    add(
        "--steps-per-second",
        action="store_true",
        default=None,
        help="print steps a second in place of the time of a step",
    )


def rank_wishes(arguments: argparse.Namespace) -> RankWishes | None:
    """Return the settings of the model of ranks; None: it is not wanted.

    Raises:
        ValueError: an option is wrong, is missing, or contradicts another one.
        FileNotFoundError: the file of ``--costs`` does not exist.
    """
    if arguments.link is None:
        for name in _OPTIONS:
            if getattr(arguments, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} is about links of ranks: add --link, or leave it out")
        if len(arguments.ranks) > 1:
            raise ValueError(
                f"--ranks is {','.join(map(str, arguments.ranks))}: add --link and --batch to "
                "compare numbers of ranks, or give one"
            )
        return None
    if arguments.batch is None:
        raise ValueError("--link needs --batch: the lines of a step, over all ranks")
    between = parse_rate("--link", arguments.link)
    inside = between
    if arguments.node_link is not None:
        inside = parse_rate("--node-link", arguments.node_link)
    latency = parse_time("--latency", arguments.latency or _LATENCY)
    least = arguments.min_columns or least_columns(arguments.dim)
    if least > arguments.dim:
        raise ValueError(f"--min-columns is {least}, but rows have --dim {arguments.dim} columns")
    costs = MEASURED if arguments.costs is None else read_costs("--costs", arguments.costs)
    wishes = RankWishes(
        arguments.ranks,
        arguments.batch,
        arguments.ranks_per_node or _NODE_SIZE,
        Links(between, inside, latency),
        arguments.cores,
        least,
        costs,
        bool(arguments.steps_per_second),
    )
    for ranks in wishes.ranks:
        _check_even(ranks, wishes)
    return wishes


def _check_even(ranks: int, wishes: RankWishes) -> None:
    if ranks > wishes.node_size and ranks % wishes.node_size:
        raise ValueError(
            f"--ranks has {ranks}, which do not fill nodes of {wishes.node_size} ranks "
            f"(--ranks-per-node): give a multiple of {wishes.node_size}, or fewer"
        )
    if wishes.batch % ranks:
        raise ValueError(
            f"--batch is {wishes.batch}, which {ranks} ranks cannot share evenly: give a multiple "
            f"of {ranks} lines"
        )


__all__ = ["RankWishes", "add_rank_options", "rank_wishes"]
