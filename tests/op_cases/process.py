"""Ops of memory, time and instruction sets."""

from __future__ import annotations

from op_cases.groups import Case, OpArguments, make_group


def step_arguments(now: int | None, *, counted: bool = True) -> OpArguments:
    group = make_group()
    clock = group.index.clock if counted else None
    return group.index.buckets, group.index.tables, group.rows.row_clock, clock, now


CASES: dict[str, dict[str, Case]] = {
    "reserve": {
        "float32": lambda: ([3, 4], 0, False),
        "int32": lambda: ([5], 1, False),
        "int64": lambda: ([0, 8], 2, True),
        "bfloat16": lambda: ([3, 4], 3, False),
        "uint8": lambda: ([3, 4], 5, False),
    },
    "available_memory": {"": lambda: ()},
    "being_changed": {"": lambda: ([64, 128],)},
    "lock_memory": {"": lambda: ([64, 128], False)},
    "unlock_memory": {"": lambda: ([64, 128], False)},
    "end_step_": {
        "": lambda: step_arguments(None),
        "time": lambda: step_arguments(1001),
        "not counted": lambda: step_arguments(None, counted=False),
    },
    "simd_level": {"": lambda: ()},
    "set_simd_level": {"baseline": lambda: (0,)},
    "compiled_with": {"": lambda: ()},
    "op_tags": {"": lambda: ()},
    "optimizer_names": {"": lambda: ()},
}
