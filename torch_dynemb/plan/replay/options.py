"""Options of a replay on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from torch_dynemb.plan.replay.grammar import (
    DEFAULT_CAPACITIES,
    DEFAULT_POLICIES,
    GRAMMAR,
    needs_time,
    parse_capacities,
    parse_policies,
    parse_share,
)
from torch_dynemb.plan.replay.outcome import ReplayWishes
from torch_dynemb.plan.replay.recording import Roles

_BATCH_SIZE = 2048
_NAMES = ("policies", "capacities", "label", "time", "batch_size", "sample_ids")


def add_replay_options(parser: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """Add the options of a replay.

    Args:
        parser: of the command.
        positive: parser of a number from 1 on.
    """
    group = parser.add_argument_group(
        "replay",
        "play the sample through tables of several policies and capacities, and compare them",
    )
    add = group.add_argument
    add("--replay", action="store_true", help="do it; the other options of this group need it")
    add(
        "--policies",
        metavar="LIST",
        help=f"{GRAMMAR} (default: {DEFAULT_POLICIES})".replace("%", "%%"),
    )
    add(
        "--capacities",
        metavar="LIST",
        help="of all tables: shares of the distinct ids, up to 1, or numbers of ids (default: "
        f"{DEFAULT_CAPACITIES})",
    )
    add(
        "--label",
        metavar="COLUMN",
        help="train a logistic regression on this column, 0 or 1, and compare the AUC on the last "
        "tenth of the lines; Criteo's is label",
    )
    add(
        "--time",
        metavar="COLUMN",
        help="seconds, ascending, for half-lives such as 7d (default: the order of lines)",
    )
    add(
        "--batch-size",
        type=positive,
        metavar="LINES",
        help=f"lines of a training step (default: {_BATCH_SIZE})",
    )
    add(
        "--sample-ids",
        metavar="SHARE",
        help="replay this share of the ids, chosen by hash; not with --label (default: fewer than "
        "all if that takes too long)",
    )


def replay_wishes(arguments: argparse.Namespace) -> ReplayWishes | None:
    """Return the settings of a replay; None: none is wanted.

    Raises:
        ValueError: an option is wrong, or contradicts another one.
    """
    if not arguments.replay:
        for name in _NAMES:
            if getattr(arguments, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} is about a replay: add --replay, or leave it out")
        return None
    policies = parse_policies(arguments.policies or DEFAULT_POLICIES)
    capacities = parse_capacities(arguments.capacities or DEFAULT_CAPACITIES)
    timed = needs_time(policies)
    if timed is not None and arguments.time is None:
        raise ValueError(
            f"--policies names {timed!r}, with a half-life in seconds: name a column of times with "
            "--time, or write the half-life as 20000steps or 33%"
        )
    share = None
    if arguments.sample_ids is not None:
        share = parse_share("--sample-ids", arguments.sample_ids)
        if arguments.label is not None and share < 1:
            raise ValueError(
                f"--sample-ids is {arguments.sample_ids} and --label is {arguments.label!r}: a "
                "model of some ids is another model; leave one option out, or use fewer --lines"
            )
    if arguments.label is not None and arguments.label == arguments.time:
        raise ValueError(f"--label and --time are both {arguments.label!r}: name two columns")
    return ReplayWishes(
        policies,
        capacities,
        Roles(arguments.label, arguments.time),
        arguments.batch_size or _BATCH_SIZE,
        share,
    )


__all__ = ["add_replay_options", "replay_wishes"]
