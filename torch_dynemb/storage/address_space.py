"""The addresses that the process can still reserve, and remedies if they run out."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple

# Bytes of addresses that a process and its GPUs have.
ADDRESS_SPACE = 1 << 47


class AddressLimit(NamedTuple):
    """A limit of the process or the machine below the size of the address space.

    Attributes:
        name: as a user knows it.
        left: bytes that can still be reserved.
        remedy: how to raise it.
    """

    name: str
    left: int
    remedy: str


def read_text(path: str) -> str:
    """Return the text of a system file; empty if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def address_limits() -> list[AddressLimit]:
    """Return the limits on reserved addresses; empty: only the size of the address space."""
    limits = []
    # sizes in pages: total, resident, shared, text, libraries, data and stack
    pages = [int(word) for word in read_text("/proc/self/statm").split()] or [0] * 6
    page = os.sysconf("SC_PAGE_SIZE")
    for name, option, kind, used in (
        ("RLIMIT_AS", "-v", resource.RLIMIT_AS, pages[0]),
        ("RLIMIT_DATA", "-d", resource.RLIMIT_DATA, pages[5]),
    ):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            limits.append(
                AddressLimit(
                    f"the limit of {limit} bytes by ulimit {option} ({name})",
                    max(0, limit - used * page),
                    f"raise it (ulimit {option} unlimited)",
                )
            )
    if read_text("/proc/sys/vm/overcommit_memory").strip() == "2":
        fields = dict(
            line.split(":", 1) for line in read_text("/proc/meminfo").splitlines() if ":" in line
        )
        limit, used = (
            1024 * int(fields.get(name, "0 kB").split()[0])
            for name in ("CommitLimit", "Committed_AS")
        )
        limits.append(
            AddressLimit(
                "vm.overcommit_memory=2, which counts reserved addresses as memory",
                max(0, limit - used),
                "set it to 0 or 1 (sysctl vm.overcommit_memory=0)",
            )
        )
    return limits


def what_ran_out(wanted: int) -> str:
    """Return a text with the reason why so many bytes could not be reserved, and the remedy."""
    reasons = [limit for limit in address_limits() if limit.left < wanted]
    bound = "give the tables a smaller max_rows or a capacity"
    if reasons:
        said = "; ".join(
            f"{limit.name} leaves {limit.left} bytes: {limit.remedy}" for limit in reasons
        )
        return f"{said}; or {bound}"
    mappings = read_text("/proc/self/maps").count("\n")
    most = read_text("/proc/sys/vm/max_map_count").strip()
    if most.isdigit() and mappings > int(most) - 16:
        return (
            f"the process has {mappings} mappings of memory, and vm.max_map_count is {most}: raise "
            "it, or put tables into one collection, which shares mappings"
        )
    return f"the addresses of the process have run out: {bound}, or delete tables"


__all__ = ["ADDRESS_SPACE", "AddressLimit", "address_limits", "read_text", "what_ran_out"]
