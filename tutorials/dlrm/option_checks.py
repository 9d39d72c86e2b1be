"""Which options of the command line do not go together, and why."""

from __future__ import annotations

from collections.abc import Mapping


def only_torchrec(values: Mapping[str, object]) -> str | None:
    """Say which option needs --torchrec."""
    for name in ("nproc", "sharding"):
        if values[name] is not None:
            return f"argument --{name}: {values[name]} is about many processes: add --torchrec"
    return None


def wrong_with_torchrec(values: Mapping[str, object]) -> str | None:
    """Say which option does not go with --torchrec, and why."""
    if values["compile"]:
        return "argument --compile: not with --torchrec: exchanging ids cannot be compiled"
    if values["quantize"]:
        return "argument --quantize: not with --torchrec: evaluate in one process"
    if values["export"] is not None:
        return f"argument --export: {values['export']} not with --torchrec: export in one process"
    if values["accumulate"] > 1:
        return (
            f"argument --accumulate: {values['accumulate']} not with --torchrec, whose tables "
            "update rows in each backward: take a smaller --batch-size"
        )
    return None


def only_files(values: Mapping[str, object]) -> str | None:
    """Say which option needs --storage ssd."""
    for name in ("cache", "storage_path", "disk"):
        if values[name] is not None:
            option = name.replace("_", "-")
            return f"argument --{option}: {values[name]} is about rows in files: add --storage ssd"
    return None


def wrong_with_files(values: Mapping[str, object]) -> str | None:
    """Say which option does not go with --storage ssd, and why."""
    if values["device"] == "cuda":
        return (
            "argument --storage: ssd not with --device cuda: rows in files need tables on the CPU"
        )
    if values["async_checkpoint"]:
        return (
            "argument --async-checkpoint: not with --storage ssd: there is no copy of the rows in "
            "memory to write from"
        )
    if values["publish"] is not None:
        return (
            f"argument --publish: {values['publish']} not with --storage ssd: changes of rows that "
            "lie in files are not recorded"
        )
    return None
