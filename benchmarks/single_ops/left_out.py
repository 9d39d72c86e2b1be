"""The ops that ops.py does not time, and why."""

from __future__ import annotations

import torch_dynemb  # noqa: F401  # registers the ops
from torch_dynemb._library.op_names import tagged_ops

_PROCESS = "it reads or sets something of the process, whatever the number of ids"
_MEMORY = "it reserves memory or gives it back: the system's time, not the op's"
_WHOLE = "it moves a whole index, as insertions do that fill it: growth.py times those"
_GPU = "it manages a GPU's memory and has no CPU kernel"
_STORE = "it works on the files of an open store: tiers.py times those"

_OF_FILES = "opens, closes, lists or updates a file: file_rows.py times its lookups and updates"
LEFT_OUT = {
    **dict.fromkeys(("file_open", "file_close", "file_stats", "file_ids"), _OF_FILES),
    **dict.fromkeys(("file_make_live", "file_apply", "file_room", "file_counts"), _OF_FILES),
    **dict.fromkeys(
        (
            *("simd_level", "set_simd_level", "store_io_paths", "end_step_"),
            *("reported_counts", "compiled_with", "being_changed", "op_tags"),
            "optimizer_names",
            *("lock_memory", "unlock_memory"),
            *("bind_lookup", "release_lookup"),
        ),
        _PROCESS,
    ),
    **dict.fromkeys(("available_memory", "reserve", "release_"), _MEMORY),
    **dict.fromkeys(("grow_", "shrink_"), _WHOLE),
    **dict.fromkeys(tagged_ops("gpu"), _GPU),
    **dict.fromkeys(tagged_ops("store"), _STORE),
    **dict.fromkeys(
        (
            *("reserve_space_", "reserve_saves_", "stage_", "stage_records_", "staged_lookup_"),
            *("prefetch_", "read_blocks", "store_submit"),
        ),
        _STORE,
    ),
}
