"""Names of tensors in files of rows and in batches. Names are never changed, only added."""

from __future__ import annotations

ID = "id"  # int64 [n]
WEIGHT = "weight"  # [n, columns]
COUNT = "count"  # int64 [n], of an id that waits for admission
SKETCH = "sketch"  # int32 [rows, width]
PLACE = "place"  # int64 [n], of changed cells in a sketch


def state_entry(name: str) -> str:
    """Return the name of an optimizer state tensor."""
    return f"state.{name}"


def score_entry(word: str) -> str:
    """Return the name of a score tensor.

    The word is ``step``, ``timestamp``, ``frequency``, ``custom`` or ``expiry``.
    """
    return f"score.{word}"


__all__ = ["COUNT", "ID", "PLACE", "SKETCH", "WEIGHT", "score_entry", "state_entry"]
