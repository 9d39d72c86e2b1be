"""JSON parser with limits on size and number of values, for files from untrusted sources.

Python takes 64 bytes for ``[]``, so a text of a few megabytes can fill the memory. The limits are
far above those of real files: a checkpoint of 100 TB has about 12 million checksums.
"""

from __future__ import annotations

import json
import os
from typing import Any

from torch_dynemb.files.locations import Location, Url

MOST_BYTES = 256 << 20
_MOST_CONTAINERS = 4_000_000  # lists and objects
_MOST_VALUES = 32_000_000


def json_of(path: Location, most_bytes: int = MOST_BYTES) -> Any:
    """Return the content of a JSON file.

    Args:
        path: the file.
        most_bytes: largest size allowed.

    Raises:
        ValueError: it is not JSON, or exceeds a limit.
        OSError: it cannot be read.
    """
    if isinstance(path, Url):
        text = path.store.read(str(path), 0, most_bytes + 1)
        if len(text) > most_bytes:
            raise ValueError(f"it has more than {most_bytes} bytes, the most that are read")
        return parsed(text)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ValueError(f"it has {size} bytes, expected at most {most_bytes}")
        text = file.read(size)
    return parsed(text)


def parsed(text: bytes) -> Any:
    """Return the content of a JSON text.

    Args:
        text: UTF-8.

    Raises:
        ValueError: it is not JSON, or has more values than allowed.
    """
    check_values(text)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"its lists are nested too deeply: {error}") from error


def check_values(text: bytes) -> None:
    """Raise ValueError if a JSON text has more values than allowed.

    Args:
        text: UTF-8.
    """
    containers = text.count(b"[") + text.count(b"{")
    if containers > _MOST_CONTAINERS:
        raise ValueError(
            f"it has {containers} lists and objects, expected at most {_MOST_CONTAINERS}"
        )
    values = text.count(b",")
    if values > _MOST_VALUES:
        raise ValueError(f"it has {values} values, expected at most {_MOST_VALUES}")


__all__ = ["MOST_BYTES", "check_values", "json_of", "parsed"]
