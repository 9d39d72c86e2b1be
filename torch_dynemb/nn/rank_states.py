"""States of tables that ranks share: names of entries by rank, and callers that lose rows.

The state dict of a module has the rows of one rank. Some programs write it on their main process
only, as they do with replicated weights. The rows of the other ranks are lost then, and only a load
would notice. So a state dict that is made for such a program raises.
"""

from __future__ import annotations

import re
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from torch_dynemb.distributed.ranks import RankGroup, default_group

# Begins entries of the state of tables that ranks share.
_ENTRY = re.compile(r"(?:rank_\d+_of_\d+|slots_\d+_to_\d+_of_\d+)(?:_at_\d+)?\.")
_DCP = "torch.distributed.checkpoint"

# Objects such as an accelerator, for which hooks save the rows of all ranks.
savers_of_all_ranks: weakref.WeakSet[Any] = weakref.WeakSet()
_warned = False


class _Saver(NamedTuple):
    """A program that writes the state of one rank.

    Attributes:
        name: for errors.
        functions: in which it makes a state dict to write.
        remedy: what to do instead.
    """

    name: str
    functions: frozenset[str]
    remedy: str


_SAVE = "call torch_dynemb.checkpoint.save on all ranks"
_LIGHTNING = _Saver(
    "Lightning",
    frozenset({"dump_checkpoint", "save_checkpoint"}),
    f"give the Trainer enable_checkpointing=False, and {_SAVE}",
)
# By package.
_SAVERS = {
    "accelerate": _Saver(
        "accelerate",
        frozenset({"get_state_dict"}),
        "call torch_dynemb.checkpoint.save_with(accelerator) before save_state, or "
        "torch_dynemb.checkpoint.save on all ranks in place of get_state_dict and save_model",
    ),
    "lightning": _LIGHTNING,
    "lightning_fabric": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "transformers": _Saver(
        "transformers",
        frozenset({"_save", "save_pretrained"}),
        f"give TrainingArguments save_strategy='no', and {_SAVE}",
    ),
}


def place_in_world(ranks: RankGroup | None) -> str:
    """Return a suffix for each rank of a smaller group; empty: all ranks are one group, or none.

    Args:
        ranks: that share a table.
    """
    world = default_group()
    if ranks is None or world is None or ranks.size == world.size():
        return ""
    return f"_at_{dist.get_rank()}"


def rank_entry(ranks: RankGroup | None) -> str:
    """Return the beginning of names of entries; empty: one process has all rows.

    ``torch.distributed.checkpoint`` keeps one tensor of those with one name, so names differ by
    rank.

    Args:
        ranks: that share a table.
    """
    place = place_in_world(ranks)
    if ranks is None or (ranks.size == 1 and not place):
        return ""
    return f"rank_{ranks.rank}_of_{ranks.size}{place}."


def rank_entries_of(names: Sequence[str]) -> list[str]:
    """Return the different beginnings of names of entries, sorted; empty ones are of one process.

    Args:
        names: of entries of a module's state.
    """
    return sorted({found[0] if (found := _ENTRY.match(name)) else "" for name in names})


def check_caller(owner: str, tables: Sequence[str], ranks: RankGroup | None) -> None:
    """Raise RuntimeError if the rows of other ranks would be lost, and warn where they may be.

    Args:
        owner: class of the module.
        tables: their names.
        ranks: that share them.
    """
    global _warned
    if ranks is None or ranks.size == 1:
        return
    have = f"{owner} ({', '.join(tables[:3])}): a state dict has the rows of one rank, but "
    have += f"{ranks.size} ranks share the table"
    for frame in _callers():
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith(_DCP):
            if getattr(frame.f_locals.get("info"), "full_state_dict", False):
                raise RuntimeError(
                    f"{have}: full_state_dict=True asks for that of all ranks on the first: leave "
                    "it out, so that torch.distributed.checkpoint saves each rank's rows, or "
                    f"{_SAVE}"
                )
            return
        saver = _SAVERS.get(module.partition(".")[0])
        if saver is None or function not in saver.functions:
            continue
        if not any(f.f_locals.get("self") in savers_of_all_ranks for f in _savers(frame, module)):
            raise RuntimeError(
                f"{have}: {saver.name}, which asks for it, writes that of one rank: {saver.remedy}"
            )
        return
    if ranks.rank == 0 and not _warned:
        _warned = True
        warnings.warn(
            f"{have}: save it on every rank and load each rank's own, or {_SAVE}; "
            "torch.distributed.checkpoint saves all of them",
            RuntimeWarning,
            stacklevel=4,
        )


def _callers() -> Iterator[FrameType]:
    """Yield the frames of the callers of this module, innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _savers(frame: FrameType, module: str) -> Iterator[FrameType]:
    """Yield a frame of a program, and the frames of its module that have led there."""
    within: FrameType | None = frame
    while within is not None and within.f_globals.get("__name__", "") == module:
        if within.f_code.co_name == "save_state":
            yield within
        within = within.f_back


__all__ = ["check_caller", "place_in_world", "rank_entries_of", "rank_entry", "savers_of_all_ranks"]
