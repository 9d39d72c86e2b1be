"""Whether saved scores and counts are such as lookups write."""

from __future__ import annotations

from torch import Tensor

from torch_dynemb.ops.columns import MAX_COUNT, STEP_AGES


def check_score(where: str, word: str, values: Tensor, step: int) -> None:
    """Raises ValueError for scores that evictions would misunderstand.

    Args:
        where: of whom they are.
        word: the score; times and custom scores may be any numbers.
        values: int64 [n], of the CPU.
        step: where the clock is.
    """
    if values.numel() == 0 or word not in ("step", "frequency"):
        return
    least, most = int(values.min()), int(values.max())
    if word == "step" and (least < 0 or least <= step - STEP_AGES):
        raise ValueError(
            f"{where} has an id of step {least}, expected 0 or more, and less than 2^32 before "
            f"{step}, where its clock is"
        )
    if word == "frequency" and not 0 <= least <= most <= MAX_COUNT:
        wrong = least if least < 0 else most
        raise ValueError(f"{where} has an id of frequency {wrong}, expected 0 to {MAX_COUNT}")


def check_waiting(where: str, ids: Tensor, counts: Tensor) -> None:
    """Raises ValueError unless ids that wait for admission are distinct and have been counted.

    Args:
        where: of whom they are.
        ids, counts: int64 [n].
    """
    if ids.numel() == 0:
        return
    least, most = int(counts.min()), int(counts.max())
    if not 1 <= least <= most <= MAX_COUNT:
        wrong = least if least < 1 else most
        raise ValueError(f"{where} has the count {wrong} of an id, expected 1 to {MAX_COUNT}")
    if ids.unique().numel() != ids.numel():
        raise ValueError(f"{where} counts an id twice")


__all__ = ["check_score", "check_waiting"]
