"""Classes of errors that the compiled library raises.

torch turns whatever an op throws into a RuntimeError with its text, so the library ends messages
with a mark of the class (``csrc/core/runtime/error_class.h``).
"""

from __future__ import annotations

import re

from torch_dynemb import errors

# at the end of a message, before the place in the source where there is one
_MARK = re.compile(r" \[(?P<name>\w+Error)\](?P<place> \(csrc/[^()]*\))?$", re.MULTILINE)


def is_marked(error: RuntimeError) -> bool:
    """Return whether the message of an op's error names a class.

    Args:
        error: what the op raised.
    """
    return not isinstance(error, errors.DynembError) and _MARK.search(str(error)) is not None


def typed_error(error: RuntimeError) -> RuntimeError:
    """Return the error of the class that a mark names, without the mark.

    Args:
        error: what the op raised; it is marked.
    """
    message = str(error)
    found = _MARK.search(message)
    assert found is not None
    kind: type[RuntimeError] = getattr(errors, found["name"])
    return kind(f"{message[: found.start()]}{found['place'] or ''}{message[found.end() :]}")


__all__ = ["is_marked", "typed_error"]
