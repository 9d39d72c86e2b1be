"""Classes of errors that the compiled library raises.

torch turns every exception of an op into a RuntimeError with its text. So the library ends messages
with a mark of the class (``csrc/core/runtime/error_class.h``).
"""

from __future__ import annotations

import re

from torch_dynemb import errors

# at the end of a message, before the place in the source if the message has one
_MARK = re.compile(r" \[(?P<name>\w+Error)\](?P<place> \(csrc/[^()]*\))?$", re.MULTILINE)


def is_marked(error: RuntimeError) -> bool:
    """Return whether the message of an op's error ends with the mark of a class.

    Args:
        error: the op's error.
    """
    return not isinstance(error, errors.DynembError) and _MARK.search(str(error)) is not None


def typed_error(error: RuntimeError) -> RuntimeError:
    """Return an error of the marked class, without the mark.

    Args:
        error: the op's error; it is marked.
    """
    message = str(error)
    found = _MARK.search(message)
    assert found is not None
    kind: type[RuntimeError] = getattr(errors, found["name"])
    return kind(f"{message[: found.start()]}{found['place'] or ''}{message[found.end() :]}")


__all__ = ["is_marked", "typed_error"]
