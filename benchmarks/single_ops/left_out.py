"""The ops that ops.py does not time, and why."""

from __future__ import annotations

_PROCESS = "it asks or tells the process something, whatever the number of ids"
_MEMORY = "it reserves memory or gives it back: the system's time, not the op's"
_WHOLE = "it moves a whole index, as insertions do that fill it: growth.py times those"
_GPU = "it manages a GPU's memory and has no CPU kernel"
_STORE = "it works on the files of an open store: tiers.py times those"

LEFT_OUT = {
    **dict.fromkeys(
        (
            *("simd_level", "set_simd_level", "store_io_paths", "advance_step_"),
            *("reported_counts", "compiled_with", "being_changed"),
        ),
        _PROCESS,
    ),
    **dict.fromkeys(("available_memory", "reserve", "release_"), _MEMORY),
    **dict.fromkeys(("grow_", "shrink_"), _WHOLE),
    **dict.fromkeys(
        (
            *("available_cuda_memory", "bind_group", "end_step", "raise_device_errors"),
            *("release_group", "reserve_cuda", "cuda_architectures"),
        ),
        _GPU,
    ),
    **dict.fromkeys(
        (
            *("store_check", "store_close", "store_drain", "store_erase", "store_hold"),
            *("store_keep", "store_load", "store_open", "store_read", "store_read_held"),
            *("store_release", "store_stats", "store_submit", "store_sync", "store_write"),
            *("promise_room_", "stage_", "staged_lookup_", "prefetch_", "read_blocks"),
        ),
        _STORE,
    ),
}
