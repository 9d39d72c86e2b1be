"""Checks that saved scores and counts are valid values of lookups."""

from __future__ import annotations

from torch import Tensor

from torch_dynemb.ops.columns import MAX_COUNT, NEVER_OCCURRED, STEP_AGES


def check_score(where: str, word: str, values: Tensor, step: int) -> None:
    """Raise ValueError for scores that eviction would misread.

    Args:
        where: beginning of errors, such as ``"table 'ads' was saved with"``.
        word: the score; times and custom scores may be any numbers.
        values: int64 [n], of the CPU.
        step: of the clock.
    """
    if values.numel() == 0 or word not in ("step", "frequency", "decayed"):
        return
    least, most = int(values.min()), int(values.max())
    if word == "step" and (least < 0 or least <= step - STEP_AGES):
        raise ValueError(
            f"{where} an id of step {least}, expected 0 or more, and less than 2^32 before "
            f"{step}, the step of its clock"
        )
    if word == "decayed" and not NEVER_OCCURRED <= least <= most <= MAX_COUNT:
        wrong = least if least < NEVER_OCCURRED else most
        raise ValueError(f"{where} an id with a decayed count of {wrong}, expected -2^62 to 2^62")
    if word == "frequency" and not 0 <= least <= most <= MAX_COUNT:
        wrong = least if least < 0 else most
        raise ValueError(f"{where} an id of frequency {wrong}, expected 0 to {MAX_COUNT}")


def check_waiting(where: str, ids: Tensor, counts: Tensor) -> None:
    """Raise ValueError unless ids below admission are distinct and have valid counts.

    Args:
        where: beginning of errors, such as ``"table 'ads' was saved with"``.
        ids, counts: int64 [n].
    """
    if ids.numel() == 0:
        return
    least, most = int(counts.min()), int(counts.max())
    if not 1 <= least <= most <= MAX_COUNT:
        wrong = least if least < 1 else most
        raise ValueError(f"{where} the count {wrong} of an id, expected 1 to {MAX_COUNT}")
    if ids.unique().numel() != ids.numel():
        raise ValueError(f"{where} two counts of an id")


__all__ = ["check_score", "check_waiting"]
